"""Only the tracker-node has the model: a node with an empty disk gets its shard from it, dies half-way, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from meshnet.addresses import split_address
from meshnet.model_files import ModelFiles
from services.node.files.description import describe
from services.node.files.fetched import FetchedModel
from services.node.files.manifest import shard_tensors
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.prompts import prompt_ids
from tests.faults.behaviour import Behaviour
from tests.faults.proxy import proxy
from tests.parity import Reference

MODEL = "smollm2-135m"
# The source listens at 127.0.0.1 and says that it is here, behind proxies.
HIDDEN_HOST = "127.0.0.2"
SOURCE = NodeSpec("source", "230MB", tracker_node=True, options=("--advertise", HIDDEN_HOST))
# The header of the file, and about half of what the empty node is to hold.
BUDGET = 25_000_000


def empty(cache: Path) -> NodeSpec:
    return NodeSpec("empty", "330MB", options=("--cache-dir", str(cache)), models=())


@pytest.fixture(scope="module")
def mesh(smollm2_gguf: Path) -> Iterator[Mesh]:
    tracker_options = ("--deploy", MODEL)
    with running_mesh(
        [f"{MODEL}={smollm2_gguf}"], [SOURCE], kv_tokens=8192, tracker_options=tracker_options
    ) as running:
        yield running


def kept(cache: Path) -> FetchedModel | None:
    folders = list((cache / "weights" / "empty" / MODEL).glob("*"))
    return FetchedModel.open(folders[0]) if folders else None


def kept_bytes(cache: Path) -> int:
    model = kept(cache)
    assert model
    return sum(model.partial.values()) + sum(model.description.tensors[name].num_bytes for name in model.present)


def test_an_empty_node_fetches_its_shard_is_killed_half_way_and_goes_on(
    mesh: Mesh, smollm2_gguf: Path, tmp_path: Path
) -> None:
    description = describe(ModelFiles(MODEL, smollm2_gguf))
    frames, prompts_port = (split_address(mesh.nodes["source"].match[i])[1] for i in (1, 2))
    listen, server = (HIDDEN_HOST, frames), ("127.0.0.1", frames)

    with proxy(listen, server, Behaviour(stalls_after=BUDGET)) as stalls:
        mesh.start_nodes([empty(tmp_path)])
        assert stalls.stalled.wait(60), mesh.logs()
        loading = mesh.wait_for(
            lambda t: any(0 < s.bytes_done < s.bytes_total for s in t.nodes["empty"].shards), "the topology shows it"
        )
        (shard,) = loading.nodes["empty"].shards
        mesh.kill_node("empty")
    size = sum(description.tensors[name].num_bytes for name in shard_tensors(description, shard.layers))
    first = kept_bytes(tmp_path)
    assert 0 < first < size

    with proxy(listen, server), proxy((HIDDEN_HOST, prompts_port), ("127.0.0.1", prompts_port)):
        mesh.start_nodes([empty(tmp_path)])
        mesh.wait_until_complete(MODEL)
        fetched = int(mesh.nodes["empty"].wait_for(r"fetched (\d+) bytes of weights")[1])
        assert first + fetched == size == kept_bytes(tmp_path)
        assert mesh.layers(MODEL) == {"source": [f"0-{shard.layers.start}"], "empty": [str(shard.layers)]}
        reference = Reference(smollm2_gguf)
        prompts = prompt_ids(AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name))
        for prompt in sorted(prompts, key=len)[:2]:
            reference.check(prompt, mesh.generate(MODEL, prompt, 24))
        mesh.wait_until_idle()

        # All that it once fetched is still there, so a restart costs the network nothing but the header.
        mesh.stop_node("empty")
        mesh.start_nodes([empty(tmp_path)])
        mesh.wait_until_complete(MODEL)
        assert "bytes of weights" not in mesh.nodes["empty"].output()
