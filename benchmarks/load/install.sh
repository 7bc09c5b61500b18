#!/bin/sh
# Puts guidellm into an environment of its own: FOLDER/guidellm. It needs torch for its loader of prompts; the release for
# CPUs does (1.5 GB in all), and what pip finds without further options may be one with CUDA, several times as large:
# PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL tell it of a better place.
set -eu
folder=${1:?usage: install.sh FOLDER}
mkdir -p "$folder"
here=$(cd "$(dirname "$0")/../.." && pwd)
cd "$folder"

[ -x guidellm/bin/python ] || python3 -m venv guidellm
# What reads the tokenizer is the same release as in the gateway; all else is guidellm's affair.
grep -E '^(torch|transformers|tokenizers)==' "$here/constraints.txt" > guidellm/constraints.txt
guidellm/bin/pip install --quiet -c guidellm/constraints.txt guidellm==0.8.1
