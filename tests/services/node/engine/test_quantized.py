"""int8 and nf4 shards against bfloat16, and the bytes that they hold."""

from __future__ import annotations

import pytest
import torch

from meshnet.model import LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import ShardSpec
from services.node.engine.executor import TorchExecutor
from services.node.engine.linear import PackedLinear, held_bytes, make_linear
from services.node.engine.shard import Entry
from services.node.files.manifest import read_manifest
from tests.parity import Reference
from tests.services.node.engine.models import TINY, VOCAB, Mesh, mesh, prompt_of, save_model, splits_of, steady
from tests.services.node.engine.rounded import likeness, requantized

# bitsandbytes is built on what torch has since deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

QUANTIZED = [Quantization.INT8, Quantization.NF4]
BYTES_TOLERANCE = 0.06


@pytest.fixture(scope="module", params=["llama", "gpt2", "falcon-new", "mixtral", "qwen3_moe", "gpt_oss"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save_model(tmp_path_factory.mktemp(request.param), steady(TINY[request.param]))


def entry_of(shards: Mesh) -> Entry:
    return shards.shards[0][0].entry(shards.manifest.model_id)


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("ends", [(), (1, 3)])
def test_quantized_shards_compute_with_the_rounded_weights(
    files: ModelFiles, quantization: Quantization, ends: tuple[int, ...]
) -> None:
    prompt = prompt_of(30)
    with mesh(files, splits_of(4, *ends), quantization) as shards:
        row = shards.step({"a": prompt})["a"]
        emitted = shards.generate({"b": prompt}, 4, chunk=16)["b"]
        wanted = requantized(Reference(files.path), quantization).logits(prompt)[-1]
        assert likeness(row, wanted, entry_of(shards)) > 0.999
    assert all(0 <= token < VOCAB for token in emitted)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_the_manifest_bounds_the_bytes_of_quantized_shards(files: ModelFiles, quantization: Quantization) -> None:
    """From above: the CPU's nf4 kernel keeps its scales at two bytes where others take four."""
    manifest = read_manifest(files)
    for layers in (manifest.all_layers, LayerRange(1, 3)):
        shard = TorchExecutor({files.model_id: files}).load(
            ShardSpec(manifest, layers, quantization, 512), lambda done, total: None
        )
        expected = manifest.weight_bytes(layers, quantization)
        assert expected * (1 - BYTES_TOLERANCE) <= shard.weight_bytes <= expected


def test_shapes_that_the_packed_nf4_kernel_cannot_take_are_still_right() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.arange(40).bfloat16()
    hidden = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        output = make_linear(weight, bias, Quantization.NF4, torch.device("cpu"))(hidden)
    wanted = torch.nn.functional.linear(hidden, weight, bias)
    assert torch.cosine_similarity(output.float(), wanted.float(), dim=-1).min() > 0.98


@pytest.mark.parametrize("tokens", [1, 3, 16, 130])
def test_the_packed_kernel_rounds_as_linear_does(tokens: int) -> None:
    if not PackedLinear.is_available(torch.device("cpu")):
        pytest.skip("this CPU or build of torch has no such kernel")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(193, 70, generator=generator).bfloat16()
    bias = torch.randn(193, generator=generator).bfloat16()
    hidden = torch.randn(1, tokens, 70, generator=generator).bfloat16()
    linear = make_linear(weight, bias, Quantization.BFLOAT16, torch.device("cpu"))
    assert isinstance(linear, PackedLinear)
    assert held_bytes(linear) == weight.nbytes + bias.nbytes
    wanted = torch.nn.functional.linear(hidden.float(), weight.float(), bias.float())
    torch.testing.assert_close(linear(hidden).float(), wanted, rtol=2**-8, atol=2**-8)
