"""One layer on trial, and what is told of the device."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from meshnet.errors import NoRoom
from meshnet.model import LayerRange, Quantization
from services.node.core.work import ShardSpec
from services.node.core.workspace import predict_workspace_bytes
from services.node.engine.device import is_out_of_memory, peak_bytes
from services.node.engine.executor import TorchExecutor
from services.node.engine.trial import LayerTrial
from services.node.files.manifest import read_manifest
from tests.services.node.engine.models import MODEL, TINY, save_model

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

CPU = torch.device("cpu")


def load(path: Path, layers: LayerRange, quantization: Quantization) -> tuple[TorchExecutor, Any]:
    files = save_model(path, TINY["llama"])
    executor = TorchExecutor({MODEL: files})
    return executor, executor.load(ShardSpec(read_manifest(files), layers, quantization, 512), lambda done, total: None)


@pytest.mark.parametrize("quantization", list(Quantization))
def test_a_trial_measures_and_leaves_nothing(tmp_path: Path, quantization: Quantization) -> None:
    executor, shard = load(tmp_path, LayerRange(2, 3), quantization)
    module = weakref.ref(shard.layers[2].module)
    trial = executor.trial(shard)
    del shard
    assert trial.decode() > 0
    assert trial.prefill() > 0
    assert trial.decode() > 0
    assert executor.num_kv_blocks == executor.kv_bytes == 0
    trial.close()
    # At INT8 bitsandbytes may log an error, whose frames hold the layer for as long as a test's log is kept.
    if quantization is not Quantization.INT8:
        assert module() is None


@pytest.mark.parametrize("quantization", [Quantization.BFLOAT16, Quantization.FLOAT32])
def test_the_workspace_is_about_as_predicted_and_grows_with_the_session(
    tmp_path: Path, quantization: Quantization
) -> None:
    executor, shard = load(tmp_path, LayerRange(2, 3), quantization)
    manifest = read_manifest(executor._files[MODEL])
    trial = executor.trial(shard)
    short, long = trial.workspace_bytes(0), trial.workspace_bytes(512)
    assert short
    assert long
    # At least the hidden states of the step, in and out.
    assert short > 512 * manifest.hidden_size * 2
    assert long > short
    predicted = predict_workspace_bytes(manifest, quantization, 512, entry=False)
    assert long < predicted


def test_an_entry_shard_pays_for_the_logits_of_all_its_sessions(tmp_path: Path) -> None:
    executor, shard = load(tmp_path, LayerRange(0, 1), Quantization.BFLOAT16)
    trial = executor.trial(shard)
    rows = 512
    assert (trial._entry_bytes(rows) or 0) >= rows * shard.vocab_size * 2


def test_memory_that_runs_out_in_the_largest_step_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, shard = load(tmp_path, LayerRange(2, 3), Quantization.BFLOAT16)
    trial = executor.trial(shard)
    monkeypatch.setattr(LayerTrial, "_run", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    with pytest.raises(NoRoom, match="out of memory"):
        trial.workspace_bytes(512)


def test_the_peak_is_of_all_that_was_there_at_once() -> None:
    def work() -> None:
        first = torch.ones(1 << 20, dtype=torch.uint8)
        second = torch.ones(1 << 21, dtype=torch.uint8)
        del first, second
        torch.ones(1 << 20, dtype=torch.uint8)

    assert peak_bytes(CPU, work) == (1 << 20) + (1 << 21)
    assert peak_bytes(CPU, gc.collect) == 0


def test_out_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_the_machine_is_named_with_what_speeds_depend_on() -> None:
    executor = TorchExecutor({}, threads=1)
    assert executor.machine.startswith("cpu (")
    assert executor.machine.endswith(f"1 threads, torch {torch.__version__}")
    assert executor.memory_free_bytes() > 0
