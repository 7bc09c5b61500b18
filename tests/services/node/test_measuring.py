"""A node measures itself: once, by its cache, and by what it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshnet.errors import LoadFailed
from meshnet.model import LayerRange, ModelManifest, Quantization
from meshnet.model_files import ModelFiles
from services.node import measuring
from services.node.config import NodeConfig
from services.node.core.shards import ShardTable
from services.node.core.work import PromptWork, Segment, SessionKey, ShardSpec
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from services.node.measuring import Measuring
from services.node.runner import Runner
from services.node.speed_cache import FILE_NAME
from services.node.stub import StubExecutor
from tests.services.node.engine.models import MODEL, TINY, save_model

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

Q = Quantization
VRAM = 100_000_000


class RecordingExecutor(TorchExecutor):
    """Remembers what it loaded."""

    def __init__(self, files: ModelFiles) -> None:
        self.models = {files.model_id: files}
        super().__init__(self.models)
        self.loaded: list[tuple[LayerRange, Quantization]] = []

    def load(self, spec: ShardSpec, progress: Any) -> Any:
        self.loaded.append((spec.layers, spec.quantization))
        return super().load(spec, progress)


@dataclass
class Bench:
    measuring: Measuring
    runner: Runner
    shards: ShardTable
    loads: asyncio.Lock
    executor: RecordingExecutor
    news: list[None]

    def measured(self) -> list[Quantization]:
        return [speed.quantization for speed in self.measuring.speeds()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save_model(tmp_path_factory.mktemp("tiny"), TINY["llama"])


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "FALLBACK_DELAY_SECONDS", 0.0)


@contextlib.asynccontextmanager
async def bench(
    files: ModelFiles, cache_dir: Path, *fallbacks: Quantization, vram_bytes: int = VRAM
) -> AsyncIterator[Bench]:
    config = NodeConfig("n", "", "", "", "", vram_bytes, Q.BFLOAT16, fallbacks=fallbacks, cache_dir=cache_dir)
    executor = RecordingExecutor(files)
    news: list[None] = []
    shards, loads = ShardTable(), asyncio.Lock()
    runner = Runner(executor, lambda works, seconds: made.observe(works, seconds))
    made = Measuring(config, {MODEL: read_manifest(files)}, runner, shards, loads, lambda: news.append(None))
    try:
        yield Bench(made, runner, shards, loads, executor, news)
    finally:
        runner.stop()


async def test_one_middle_layer_is_measured_at_each_quantization_and_known_from_then_on(
    files: ModelFiles, tmp_path: Path
) -> None:
    middle = LayerRange(2, 3)
    async with bench(files, tmp_path, Q.INT8, Q.NF4) as b:
        assert b.measuring.speeds() == ()
        await b.measuring.run()
        measured = b.measuring.speeds()
        assert [speed.quantization for speed in measured] == [Q.BFLOAT16, Q.INT8, Q.NF4]
        assert all(speed.decode_tokens_per_second > 0 < speed.prefill_tokens_per_second for speed in measured)
        assert b.executor.loaded == [(middle, Q.BFLOAT16), (middle, Q.INT8), (middle, Q.NF4)]
        assert len(b.news) == 3
        assert b.executor.kv_bytes == 0
    async with bench(files, tmp_path, Q.INT8, Q.NF4) as again:
        assert again.measuring.speeds() == measured
        await again.measuring.run()
        assert again.executor.loaded == []


async def test_a_damaged_cache_is_measured_again(files: ModelFiles, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("no json")
    async with bench(files, tmp_path) as b:
        await b.measuring.run()
        assert b.measured() == [Q.BFLOAT16]


async def test_fallbacks_of_large_layers_are_not_measured(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "CHEAP_LAYER_BYTES", 1000)
    async with bench(files, tmp_path, Q.INT8) as b:
        await b.measuring.run()
        assert b.measured() == [Q.BFLOAT16]


async def test_what_does_not_fit_is_not_measured(
    files: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with bench(files, tmp_path, vram_bytes=100_000) as b:
            await b.measuring.run()
            assert b.executor.loaded == []
    assert "one layer needs" in caplog.text


async def test_files_that_cannot_be_loaded_are_said_and_no_error(
    files: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(files, tmp_path) as b:
        b.executor._files.clear()
        await b.measuring.run()
        assert b.measuring.speeds() == ()
    assert "no files of model" in caplog.text


async def test_a_layer_that_loads_too_long_is_given_up(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measuring, "LOAD_SECONDS", -1.0)
    async with bench(files, tmp_path) as b:
        await b.measuring.run()
        assert b.measuring.speeds() == ()
    assert "did not load within" in caplog.text


async def test_nothing_is_measured_while_a_shard_is_loaded(files: ModelFiles, tmp_path: Path) -> None:
    async with bench(files, tmp_path) as b:
        async with b.loads:
            running = asyncio.create_task(b.measuring.run())
            for _ in range(20):
                await asyncio.sleep(0)
            assert b.executor.loaded == []
        await asyncio.wait_for(running, 30)
        assert b.measured() == [Q.BFLOAT16]


async def serve(b: Bench, manifest: ModelManifest) -> LayerRange:
    layers = LayerRange(0, 4)
    spec = ShardSpec(manifest, layers, Q.BFLOAT16, 512)
    shard = b.executor.load(spec, lambda done, total: None)
    await b.runner.call(lambda: b.executor.attach(shard))
    b.shards.add(spec)
    return layers


def prompt(layers: LayerRange, position: int, num_tokens: int) -> PromptWork:
    segment = Segment(SessionKey("s", MODEL, layers), position, num_tokens, 1)
    return PromptWork(MODEL, layers, (segment,), (7,) * num_tokens)


async def test_steps_that_serve_tell_a_speed_that_was_not_measured(files: ModelFiles, tmp_path: Path) -> None:
    async with bench(files, tmp_path) as b:
        layers = await serve(b, read_manifest(files))
        await b.runner.submit(prompt(layers, 0, 128))
        await b.runner.submit(prompt(layers, 128, 1))
        assert b.measured() == [Q.BFLOAT16]
        assert len(b.news) == 1


async def test_a_step_that_failed_tells_nothing(files: ModelFiles, tmp_path: Path) -> None:
    async with bench(files, tmp_path) as b:
        layers = await serve(b, read_manifest(files))
        heard: list[float] = []
        b.measuring.observe = lambda works, seconds: heard.append(seconds)  # type: ignore[method-assign]
        with pytest.raises(Exception, match="has 0 tokens cached here, not 5"):
            await b.runner.submit(prompt(layers, 5, 1))
        await b.runner.submit(prompt(layers, 0, 1))
        assert len(heard) == 1


def written(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_a_stub_measures_nothing(files: ModelFiles, tmp_path: Path) -> None:
    config = NodeConfig("n", "", "", "", "", VRAM, Q.BFLOAT16, cache_dir=tmp_path, stub=True)
    runner = Runner(StubExecutor())
    shards = ShardTable()
    made = Measuring(config, {MODEL: read_manifest(files)}, runner, shards, asyncio.Lock(), lambda: None)
    await made.run()
    layers = LayerRange(0, 4)
    shards.add(ShardSpec(read_manifest(files), layers, Q.BFLOAT16, 512))
    made.observe([prompt(layers, 0, 128)], 1.0)
    made.observe([prompt(layers, 128, 1)], 1.0)
    assert made.speeds() == ()
    assert written(tmp_path) == []
    runner.stop()


async def test_stopping_ends_a_load(files: ModelFiles, tmp_path: Path) -> None:
    async with bench(files, tmp_path) as b:
        begun, ended = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def load(spec: ShardSpec, progress: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            try:
                while True:
                    progress(0, 1)
            except LoadFailed:
                loop.call_soon_threadsafe(ended.set)
                raise

        b.executor.load = load  # type: ignore[method-assign]
        running = asyncio.create_task(b.measuring.run())
        async with asyncio.timeout(5):
            await begun.wait()
            running.cancel()
            await ended.wait()
        assert b.measuring.speeds() == ()
