"""Values that are not finite never leave a step unnoticed: what came is told from what was computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from meshnet.errors import BrokenLayers, NotFinite
from meshnet.model import LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import ForwardWork, PromptWork, SampleWork, Sampling, Segment, SessionKey, ShardSpec
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from tests.services.node.engine.models import MODEL, TINY, run, save_model

ALL = LayerRange(0, 4)
WIDTH = 64
FINE = np.full(WIDTH, 0x3F80, np.uint16).tobytes()  # ones
NAN, INFINITE = (np.full(WIDTH, bits, np.uint16).tobytes() for bits in (0xFFFF, 0x7F80))


def executor_of(files: ModelFiles) -> TorchExecutor:
    executor = TorchExecutor({MODEL: files})
    spec = ShardSpec(read_manifest(files), ALL, Quantization.BFLOAT16, 2048)
    executor.attach(executor.load(spec, lambda done, total: None))
    return executor


def broken_files(folder: Path, name: str) -> ModelFiles:
    """One value of that tensor is infinite."""
    files = save_model(folder, TINY["llama"])
    tensors = load_file(files.path / "model.safetensors")
    tensors[name][1] = float("inf")
    save_file(tensors, files.path / "model.safetensors", {"format": "pt"})
    return files


def forward(session: str, hidden: bytes) -> ForwardWork:
    num_tokens = len(hidden) // len(FINE)
    return ForwardWork(MODEL, ALL, (Segment(SessionKey(session, MODEL, ALL), 0, num_tokens, 1),), hidden)


def test_layers_that_compute_nonsense_say_so(tmp_path: Path) -> None:
    executor = executor_of(broken_files(tmp_path, "model.layers.2.mlp.down_proj.weight"))
    prompt = PromptWork(MODEL, ALL, (Segment(SessionKey("p", MODEL, ALL), 0, 3, 0),), (1, 2, 3))
    (of_prompt,) = executor.run([prompt])
    results = executor.run([forward("a", FINE), forward("b", FINE * 2)])
    assert all(isinstance(result, BrokenLayers) for result in (of_prompt, *results)), results
    assert "layers 0-4" in str(results[0])


@pytest.mark.parametrize("bad", [NAN, INFINITE, FINE + NAN, NAN + FINE])
def test_what_came_broken_is_refused_alone(tmp_path: Path, bad: bytes) -> None:
    executor = executor_of(save_model(tmp_path, TINY["llama"]))
    (alone,) = run(executor, [forward("a", FINE)])
    first, second, third = executor.run([forward("b", FINE), forward("c", bad), forward("d", FINE)])
    assert [first, third] == [alone, alone]
    assert isinstance(second, NotFinite)


def test_a_head_that_computes_nonsense_says_so(tmp_path: Path) -> None:
    executor = executor_of(broken_files(tmp_path, "model.norm.weight"))
    fine, bad = (SampleWork(MODEL, hidden, Sampling(temperature=1.0), 0.5) for hidden in (FINE, NAN))
    of_fine, of_bad = executor.run([fine, bad])
    assert isinstance(of_fine, BrokenLayers)
    assert isinstance(of_bad, NotFinite)
