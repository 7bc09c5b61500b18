"""Weights fetched over real HTTP from a node's file server: exactly a shard's tensors, checked, resumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM
from yarl import URL

from meshnet.errors import BadFiles, LoadFailed, NoSource
from meshnet.model import LayerRange, Quantization
from meshnet.model_files import ModelFiles
from meshnet.topology import Topology
from services.node.config import NodeConfig
from services.node.core.compression import Compression
from services.node.core.sessions import SessionTable
from services.node.core.shards import ShardTable
from services.node.core.work import ForwardWork, Segment, SessionKey, ShardSpec
from services.node.engine.buffers import to_buffer
from services.node.engine.executor import TorchExecutor
from services.node.fetching.fetcher import PIECE_BYTES, Fetcher, Progress
from services.node.fetching.mesh_weights import MeshWeights
from services.node.fetching.peer_source import PeerSource
from services.node.fetching.ranges import make_client
from services.node.fetching.source import Source, SourceFailed
from services.node.files.description import describe
from services.node.files.fetched import DESCRIPTION_FILE, JOURNAL_FILE, FetchedModel, file_digest
from services.node.files.manifest import read_manifest, shard_tensors
from services.node.forwarding import Forwarding
from services.node.http_server import HttpServer
from services.node.peers import Peers
from services.node.runner import Runner
from services.node.stub import StubExecutor
from tests.services.node.engine.models import TINY, run, save_model
from tests.smollm2 import smollm2_path

MIDDLE = LayerRange(1, 3)
FIRST = LayerRange(0, 2)


def ignore(done: int, total: int) -> None:
    """Progress that nobody wants."""


def stored_bytes(files: ModelFiles, layers: LayerRange) -> int:
    description = describe(files)
    return sum(description.tensors[name].num_bytes for name in shard_tensors(description, layers))


@asynccontextmanager
async def served(*models: ModelFiles, cache: Path | None = None) -> AsyncIterator[str]:
    """The HTTP server of a node that has these models; its address."""
    config = NodeConfig("n", "", "", "", "", 0, Quantization.BFLOAT16, models={m.model_id: m for m in models})
    peers, runner = Peers(Topology, Compression.OFF, 5.0), Runner(StubExecutor())
    weights = MeshWeights(cache, "n", "", Topology) if cache else None
    server = HttpServer(config, Forwarding(ShardTable(), SessionTable(), runner, peers, 1.0), dict, weights)
    try:
        yield await server.start("127.0.0.1:0")
    finally:
        await server.stop()
        await peers.close()
        runner.stop()


async def fetch(
    root: Path,
    files: ModelFiles,
    layers: LayerRange,
    addresses: Sequence[str],
    progress: Progress = ignore,
    wrap: Any = lambda source: source,
) -> tuple[FetchedModel, int]:
    """What is there in the end, and how many bytes of weights came."""
    manifest = read_manifest(files)
    with make_client(follow_redirects=False) as client:
        sources: list[Source] = [
            PeerSource(client, address, address, files.model_id, manifest.revision) for address in addresses
        ]
        sources[:1] = [wrap(source) for source in sources[:1]]
        fetcher = Fetcher(files.model_id, manifest.revision, lambda: sources, patience=0.5)

        def get() -> FetchedModel:
            model = fetcher.open(root)
            try:
                fetcher.fetch(model, shard_tensors(model.description, layers), progress)
            finally:
                model.close()
            return model

        model = await asyncio.to_thread(get)
    return model, fetcher.fetched_bytes


def outputs(files: ModelFiles, layers: LayerRange, folder: Path | None) -> bytes:
    """Of a few tokens in the middle of the model: from its own files, or from what was fetched."""
    manifest = read_manifest(files)
    executor = TorchExecutor({} if folder else {files.model_id: files})
    spec = ShardSpec(manifest, layers, Quantization.BFLOAT16, 128, fetched=folder)
    executor.attach(executor.load(spec, ignore))
    hidden = torch.randn(3, manifest.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    segment = Segment(SessionKey("s", manifest.model_id, layers), 0, 3, 3)
    work = ForwardWork(manifest.model_id, layers, (segment,), to_buffer(hidden))
    return bytes(run(executor, [work])[0])


def sharded(path: Path) -> ModelFiles:
    """A model in several weight files."""
    files = save_model(path / "one", TINY["qwen3_moe"])
    AutoModelForCausalLM.from_pretrained(files.path).save_pretrained(path / "many", max_shard_size="40KB")
    assert len(list((path / "many").glob("*.safetensors"))) > 3
    return ModelFiles(files.model_id, path / "many")


@pytest.mark.parametrize("kind", ["one file", "several files", "gguf"])
async def test_a_shard_is_fetched_and_computes_what_the_files_do(kind: str, tmp_path: Path) -> None:
    if kind == "gguf":
        files = ModelFiles("smollm2", smollm2_path())
    else:
        files = sharded(tmp_path) if kind == "several files" else save_model(tmp_path / "model", TINY["llama"])
    async with served(files) as address:
        seen: list[tuple[int, int]] = []
        model, fetched = await fetch(
            tmp_path / "cache", files, MIDDLE, [address], lambda done, total: seen.append((done, total))
        )
        size = stored_bytes(files, MIDDLE)
        assert fetched == size
        assert seen[0] == (0, size)
        assert seen[-1] == (size, size)
        assert seen == sorted(seen)
        assert outputs(files, MIDDLE, model.folder) == outputs(files, MIDDLE, None)
        # Once more costs nothing, and another shard only what it has beside.
        assert (await fetch(tmp_path / "cache", files, MIDDLE, [address]))[1] == 0
        _, more = await fetch(tmp_path / "cache", files, LayerRange(0, 3), [address])
        assert more == stored_bytes(files, LayerRange(0, 3)) - size


async def test_only_what_was_fetched_takes_room_on_the_disk(tmp_path: Path) -> None:
    files = ModelFiles("smollm2", smollm2_path())
    layers = LayerRange(10, 13)
    async with served(files) as address:
        model, _ = await fetch(tmp_path, files, layers, [address])
    weights = model.folder / files.path.name
    header = model.description.header_bytes(files.path.name)
    assert weights.stat().st_size == files.path.stat().st_size
    assert weights.stat().st_blocks * 512 < stored_bytes(files, layers) + header + (256 << 10)


async def test_what_was_not_fetched_is_never_read(tmp_path: Path) -> None:
    """The files have zeros in its place."""
    for kind, files in (("safetensors", save_model(tmp_path / "m", TINY["llama"])), ("gguf", _smollm2())):
        async with served(files) as address:
            model, _ = await fetch(tmp_path / kind, files, MIDDLE, [address])
        with pytest.raises(BadFiles, match="has not been fetched"):
            outputs(files, LayerRange(2, 4), model.folder)


class Died(Exception):
    pass


async def test_a_fetch_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    files = _smollm2()
    layers = LayerRange(0, 4)
    size = stored_bytes(files, layers)
    came = []

    def dies_half_way(done: int, total: int) -> None:
        came.append(done)
        if done > total // 2:
            raise Died

    async with served(files) as address:
        with pytest.raises(Died):
            await fetch(tmp_path, files, layers, [address], dies_half_way)
        model, rest = await fetch(tmp_path, files, layers, [address])
    assert size // 2 < came[-1] < size
    assert came[-1] + rest == size
    assert outputs(files, LayerRange(1, 4), model.folder) == outputs(files, LayerRange(1, 4), None)


async def test_a_torn_journal_costs_one_piece_at_most(tmp_path: Path) -> None:
    files = _smollm2()
    async with served(files) as address:
        model, _ = await fetch(tmp_path, files, MIDDLE, [address])
        journal = model.folder / JOURNAL_FILE
        journal.write_bytes(journal.read_bytes()[:-9])
        _, again = await fetch(tmp_path, files, MIDDLE, [address])
        assert again <= PIECE_BYTES
        assert (await fetch(tmp_path, files, MIDDLE, [address]))[1] == 0


class Corrupting:
    """A source on whose way a byte is lost: neither at the beginning nor at the end of a tensor."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.name = "the corrupting one"
        self.describe, self.digests = source.describe, source.digests

    def stream(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        for chunk in self._source.stream(file, begin, end):
            if begin and len(chunk) > 9000:
                yield chunk[:5000] + bytes([chunk[5000] ^ 1]) + chunk[5001:]
            else:
                yield chunk


class CutOff(Corrupting):
    """A source that breaks off in the middle of everything."""

    def stream(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        for chunk in self._source.stream(file, begin, end):
            yield chunk
            if begin:
                raise SourceFailed("cut off")


@pytest.mark.parametrize("fault", [Corrupting, CutOff])
async def test_another_source_is_taken_for_one_that_fails(fault: Any, tmp_path: Path) -> None:
    files = _smollm2()
    async with served(files) as one, served(files) as two:
        model, _ = await fetch(tmp_path, files, MIDDLE, [one, two], wrap=fault)
        assert outputs(files, MIDDLE, model.folder) == outputs(files, MIDDLE, None)


async def test_wrong_bytes_from_all_sources_are_never_kept(tmp_path: Path) -> None:
    files = _smollm2()
    async with served(files) as address:
        with pytest.raises(NoSource, match="is not what it should be"):
            await fetch(tmp_path, files, MIDDLE, [address], wrap=Corrupting)
        (folder,) = (tmp_path / files.model_id).iterdir()
        held = FetchedModel.open(folder)
        assert all(held.digest(name) == describe_digest(files, name) for name in held.present)
        _, fetched = await fetch(tmp_path, files, MIDDLE, [address])
        assert fetched > 0


def describe_digest(files: ModelFiles, name: str) -> str:
    tensor = describe(files).tensors[name]
    return file_digest(files.path.parent / tensor.file, tensor.begin, tensor.num_bytes)


async def test_weights_of_another_revision_are_refused(tmp_path: Path) -> None:
    files = save_model(tmp_path / "one", TINY["llama"])
    other = save_model(tmp_path / "other", TINY["llama-tied-head-dim"])
    async with served(other) as address:
        with pytest.raises(NoSource, match="no weights of model"):
            await fetch(tmp_path / "cache", files, MIDDLE, [address])


async def test_a_source_whose_files_were_exchanged_is_refused(tmp_path: Path) -> None:
    files = save_model(tmp_path / "model", TINY["llama"])
    manifest = read_manifest(files)
    async with served(files) as address, aiohttp.ClientSession() as http:
        url = f"http://{address}/models/{files.model_id}/{manifest.revision}"
        async with http.get(url) as answer:
            assert answer.status == 200
        weights = files.path / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        async with http.get(url) as answer:
            assert answer.status == 404


async def test_nobody_has_the_weights(tmp_path: Path) -> None:
    files = save_model(tmp_path / "model", TINY["llama"])
    with pytest.raises(NoSource, match="none has them"):
        await fetch(tmp_path / "cache", files, MIDDLE, [])
    with pytest.raises(NoSource, match="onnect"):
        await fetch(tmp_path / "cache", files, MIDDLE, ["127.0.0.1:9"])


async def test_damage_on_the_disk_is_found_and_mended(tmp_path: Path) -> None:
    files = save_model(tmp_path / "model", TINY["llama"])
    async with served(files) as address:
        model, _ = await fetch(tmp_path / "cache", files, MIDDLE, [address])
        name = min(shard_tensors(model.description, MIDDLE))
        tensor = model.description.tensors[name]
        with (model.folder / tensor.file).open("r+b") as file:
            file.seek(tensor.begin)
            file.write(bytes(16))
        model, fetched = await fetch(tmp_path / "cache", files, MIDDLE, [address])
        assert fetched == tensor.num_bytes
        (model.folder / DESCRIPTION_FILE).write_text("{}")
        model, _ = await fetch(tmp_path / "cache", files, MIDDLE, [address])
    assert outputs(files, MIDDLE, model.folder) == outputs(files, MIDDLE, None)


async def test_a_node_passes_on_what_it_fetched(tmp_path: Path) -> None:
    files = save_model(tmp_path / "model", TINY["llama"])
    async with served(files) as address:
        await fetch(tmp_path / "one", files, MIDDLE, [address])
    async with served(cache=tmp_path / "one") as address:
        model, fetched = await fetch(tmp_path / "two", files, MIDDLE, [address])
        assert fetched == stored_bytes(files, MIDDLE)
        assert outputs(files, MIDDLE, model.folder) == outputs(files, MIDDLE, None)
        with pytest.raises(NoSource, match="is not here"):
            await fetch(tmp_path / "two", files, FIRST, [address])


async def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    files = save_model(tmp_path / "model", TINY["llama"])
    async with served(files) as address:
        model, _ = await fetch(tmp_path / "cache", files, MIDDLE, [address])
        model.claim()
        with pytest.raises(LoadFailed, match="another process"):
            await fetch(tmp_path / "cache", files, FIRST, [address])
        model.close()


async def test_a_full_disk_is_said(tmp_path: Path) -> None:
    """A file that cannot grow further stands for it."""
    files = save_model(tmp_path / "model", TINY["llama"])
    async with served(files) as address:
        model, _ = await fetch(tmp_path / "cache", files, MIDDLE, [address])
        weights = model.folder / "model.safetensors"
        weights.unlink()
        weights.symlink_to("/dev/full")
        with pytest.raises(BadFiles, match="cannot be kept in"):
            await fetch(tmp_path / "cache", files, LayerRange(0, 4), [address])


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/models/absent/r", 404),
        ("/models/..%2F..%2Fetc/r", 404),
        ("/models/{model}/..%2Fr", 404),
        ("/models/{model}/{revision}/files/config.json", 404),
        ("/models/{model}/{revision}/files/..%2Fconfig.json", 404),
        ("/models/{model}/{revision}/files/%2Fetc%2Fpasswd", 404),
        ("/models/{model}/{revision}/files/model.safetensors", 200),
    ],
)
async def test_only_weight_files_are_given(path: str, status: int, shell: tuple[str, ModelFiles]) -> None:
    address, files = shell
    url = f"http://{address}" + path.format(model=files.model_id, revision=read_manifest(files).revision)
    async with aiohttp.ClientSession() as http, http.get(_encoded(url)) as answer:
        assert answer.status == status


@pytest.mark.parametrize("body", [b"", b"[]", b'{"tensors": 1}', b'{"tensors": [1]}', b"[" * 100_000, b"\xff"])
async def test_bodies_that_ask_for_nothing_are_refused(body: bytes, shell: tuple[str, ModelFiles]) -> None:
    address, files = shell
    url = f"http://{address}/models/{files.model_id}/{read_manifest(files).revision}/digests"
    async with aiohttp.ClientSession() as http, http.post(url, data=body) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "invalid_request"


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncIterator[tuple[str, ModelFiles]]:
    files = save_model(tmp_path / "model", TINY["llama"])
    async with served(files) as address:
        yield address, files


def _encoded(url: str) -> Any:
    return URL(url, encoded=True)


def _smollm2() -> ModelFiles:
    return ModelFiles("smollm2", smollm2_path())
