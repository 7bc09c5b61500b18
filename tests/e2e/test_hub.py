"""One node takes a model from a hub; it and a node that knows no hub bring here what they serve and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from meshnet.model_files import ModelFiles
from services.node.files.description import describe
from services.node.files.manifest import shard_tensors
from services.node.files.weight_samples import blocks
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama, token_ids
from tests.hub import COMMIT, REPO, Hub, hub
from tests.parity import Reference

MODEL = "tiny"
WEIGHTS = "model.safetensors"


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub(save_tiny_llama(tmp_path / "repository", vocabulary=True)) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("MESHNET_CACHE_DIR", str(tmp_path / "cache"))
        yield running


def stored_bytes(files: ModelFiles, mesh: Mesh) -> int:
    """What the shards of all nodes take in the file."""
    description = describe(files)
    names = {
        name
        for node in mesh.topology().nodes.values()
        for shard in node.shards
        for name in shard_tensors(description, shard.layers)
    }
    return sum(description.tensors[name].num_bytes for name in names)


def test_a_model_of_a_hub_is_served_by_nodes_that_fetch_their_parts(
    serving: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ModelFiles(MODEL, serving.folder)
    description = describe(files)
    samples = sum(length for tensor in description.tensors.values() for _, length in blocks(tensor.num_bytes))
    header = description.header_bytes(WEIGHTS)
    reference = Reference(serving.folder)
    prompt = [7, 100, 300, 20, 411]
    with running_mesh([f"{MODEL}=hf:{REPO}"], [], tracker_options=["--deploy", MODEL], kv_tokens=KV_TOKENS) as mesh:
        mesh.start_nodes([NodeSpec("hub", room_for(3), tracker_node=True)])
        # Until the mesh is covered nothing of the weights was asked for but headers and samples.
        assert serving.sent[WEIGHTS] == header + samples
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        mesh.start_nodes([NodeSpec("empty", room_for(3), models=())])
        mesh.wait_until_complete(MODEL)
        assert mesh.layers(MODEL) == {"hub": ["0-3"], "empty": ["3-6"]}
        reference.check(prompt, mesh.generate(MODEL, prompt, 16, node_id="hub"))
        # Each tensor came from the hub once, the other node's by way of the first.
        assert serving.sent[WEIGHTS] == header + samples + header * 2 + stored_bytes(files, mesh)

        monkeypatch.setenv("HF_ENDPOINT", serving.url)
        mesh.start_gateway()
        assert mesh.gateway
        with mesh.gateway:
            body = {"model": MODEL, "prompt": "t7 t100 t300", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{mesh.gateway_url}/v1/completions", json=body, timeout=60).json()
            reference.check([7, 100, 300], token_ids(answer["choices"][0]["text"]))

        # A node that is started again knows the model without the hub.
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        mesh.stop_node("hub")
        mesh.start_nodes([NodeSpec("hub", room_for(3), tracker_node=True)])
        mesh.wait_until_complete(MODEL)
        assert f"going on with commit {COMMIT[:12]}" in mesh.nodes["hub"].output()
        reference.check(prompt, mesh.generate(MODEL, prompt, 16, node_id="hub"))
        mesh.wait_until_idle()
