"""Every architecture on each kind of device, at each precision, against transformers on that device.

The tests of a CUDA device are skipped where torch finds none; the same code runs on the CPU, for a few architectures.
`make cuda` runs what needs a CUDA device alone, beside what tests/services/node/engine/test_oracle.py has for one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshnet.model import Quantization
from services.node.core.work import Sampling
from services.node.engine.fused import GROUPS
from tests.oracle import quantize
from tests.parity import Reference
from tests.services.node.engine.comparison import CUDA, DEVICES, PARTS, in_steps, make_case
from tests.services.node.engine.models import TINY, load, mesh, prompt_of, save_model, splits_of, steady

# bitsandbytes is built on what torch has since deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

ON_CPU = ["llama", "gpt2", "gemma3", "mixtral"]
PLACES: list[Any] = [("cpu", kind) for kind in ON_CPU] + [pytest.param("cuda", kind, marks=CUDA) for kind in TINY]
PRECISIONS = [Quantization.FLOAT32, Quantization.BFLOAT16, Quantization.INT8, Quantization.NF4]


@pytest.mark.parametrize("quantization", PRECISIONS)
@pytest.mark.parametrize(("device", "kind"), PLACES)
def test_shards_compute_what_transformers_does(
    tmp_path: Path, device: str, kind: str, quantization: Quantization
) -> None:
    files = save_model(tmp_path, steady(TINY[kind]))
    steps = in_steps(prompt_of(40), 21, 15)
    case = make_case(files, Reference(files.path, torch.float32), quantization, device, steps)
    with case.mesh(PARTS) as shards:
        logits = case.logits(shards)
        emitted = shards.generate({"greedy": case.tokens[:21]}, 6)["greedy"]
    assert logits.device.type == device
    case.check(logits, case.tokens[:21], emitted, real_size=False)


@pytest.mark.parametrize("quantization", PRECISIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_what_a_shard_holds_is_on_its_device(tmp_path: Path, device: str, quantization: Quantization) -> None:
    files = save_model(tmp_path, TINY["llama"])
    with mesh(files, splits_of(4, 2), quantization, device) as shards:
        rows = shards.step({"a": prompt_of(9), "b": prompt_of(17)})
        drawn = shards.sample(rows, Sampling(temperature=0.8, top_k=20, top_p=0.9))
        assert set(drawn) == {"a", "b"}
        for executor, layers in shards.shards:
            assert executor.machine.startswith(device)
            assert executor.memory_free_bytes() > 0
            trial = executor.trial(load(files, layers, quantization, device))
            assert trial.decode() > 0
            assert trial.prefill() > 0
            assert trial.workspace_bytes(256)
            trial.close()
    module = load(files, splits_of(4)[0], quantization, device).layers[0].module
    assert {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]} == {device}


def separated(name: str) -> list[str]:
    """What transformers calls a layer, or those of which one was made."""
    parent, _, own = name.removesuffix(".group.linear").rpartition(".")
    siblings = {"output": ["o_proj"], "down": ["down_proj"], "qkv": list(GROUPS[0]), "gate_up": list(GROUPS[1])}
    siblings |= {first: list(group) for group in GROUPS for first in group if name.endswith(".group.linear")}
    return [f"{parent}.{sibling}".removeprefix(".") for sibling in siblings.get(own, [own])]


# Falcon's linear layers are of a class of their own, which transformers passes over.
@pytest.mark.parametrize("kind", [kind for kind in TINY if TINY[kind]["model_type"] != "falcon"])
def test_the_modules_that_are_quantized_are_those_that_transformers_quantizes(tmp_path: Path, kind: str) -> None:
    """All linear layers but the head. Experts, which transformers leaves as they are, are beside them."""
    from bitsandbytes.nn import Linear4bit

    files = save_model(tmp_path, TINY[kind])
    wanted = quantize(Reference(files.path).model, Quantization.NF4)
    shard = load(files, splits_of(4)[0], Quantization.NF4)
    seen = {
        f"{index}.{whole}"
        for index, layer in shard.layers.items()
        for name, module in layer.module.named_modules()
        if isinstance(module, Linear4bit) and ".experts." not in name
        for whole in separated(name.removeprefix("layer."))
    }
    assert seen == {name.partition("layers.")[2] or name.partition("h.")[2] for name in wanted}
