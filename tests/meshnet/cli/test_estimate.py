"""`meshnet estimate`, run for real: with machines that do not exist, and of a mesh that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshnet import convert
from meshnet.convert import manifest_to_proto
from meshnet.estimate.spec import parse_nodes
from meshnet.estimate.surroundings import node_of_spec
from meshnet.inspection import Inspection
from meshnet.model import KvPrecision, ModelManifest
from meshnet.model_files import ModelFiles
from meshnet.topology import DeployedModel
from services.node.files.manifest import read_manifest
from services.tracker.placement import plan
from tests.e2e.commands import meshnet
from tests.e2e.mesh import NodeSpec, running_mesh
from tests.e2e.tiny import KV_TOKENS, NUM_LAYERS, room_for, save_tiny_llama
from tests.processes import ROOT

LLAMA_70B = "docs/estimates/llama-3-70b.json"
SECONDS = 120


def refused(*arguments: str) -> str:
    outcome = subprocess.run(
        [sys.executable, "-m", "meshnet.cli", "estimate", *arguments],
        capture_output=True, text=True, timeout=SECONDS, check=False, cwd=ROOT,
    )  # fmt: skip
    assert outcome.returncode != 0
    return outcome.stderr


def shards(told: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    return {node["node_id"]: [(layers["start"], layers["end"]) for layers in node["layers"]] for node in told["nodes"]}


@pytest.fixture(scope="module")
def manifest_70b() -> ModelManifest:
    return Inspection.from_json(
        subprocess.run(
            [sys.executable, "-m", "services.node.inspecting", LLAMA_70B],
            capture_output=True, text=True, timeout=SECONDS, check=True, cwd=ROOT,
        ).stdout
    ).manifest  # fmt: skip


def test_a_model_without_weights_on_machines_that_do_not_exist() -> None:
    said = meshnet("estimate", "--model", LLAMA_70B, "--node", "4*rtx4090,quantization=int8", "--sessions", "8")
    assert "llama-3-70b, KV cache for 65,536 tokens in each layer" in said
    assert "route: node-0:0-" in said
    assert "2,048" in said
    assert "limited by" in said


def test_the_shards_are_those_of_the_planner(manifest_70b: ModelManifest) -> None:
    texts = ["name=first,48GB,quantization=int8", "3*rtx3090,quantization=bfloat16+nf4", "desktop,memory=64GB"]
    options = [option for text in texts for option in ("--node", text)]
    told = json.loads(meshnet("estimate", "--model", LLAMA_70B, *options, "--json"))
    nodes = [node_of_spec(spec, manifest_70b, is_first=i == 0) for i, spec in enumerate(parse_nodes(texts))]
    # Over the wire, as they went to the tracker.
    manifest = convert.manifest_from_proto(manifest_to_proto(manifest_70b))
    model = DeployedModel(manifest, manifest.context_length)
    drafts = plan([convert.node_from_proto(convert.node_to_proto(node)) for node in nodes], [model]).drafts
    wanted: dict[str, list[tuple[int, int]]] = {node.node_id: [] for node in nodes}
    for draft in drafts:
        wanted[draft.node_id].append((draft.layers.start, draft.layers.end))
    assert drafts
    assert shards(told) == {node_id: sorted(layers) for node_id, layers in wanted.items()}
    for node, estimated in zip(sorted(nodes, key=lambda n: n.node_id), told["nodes"], strict=True):
        held = [draft for draft in drafts if draft.node_id == node.node_id]
        weights = sum(manifest.weight_bytes(draft.layers, draft.quantization) for draft in held)
        kv = sum(len(d.layers) * manifest.kv_bytes(model.kv_tokens, d.quantization, KvPrecision.BFLOAT16) for d in held)
        assert (estimated["weight_bytes"], estimated["kv_bytes"]) == (weights, kv)
        assert estimated["free_bytes"] >= 0


def test_what_does_not_fit_is_said_and_no_speed_is_made_up() -> None:
    said = meshnet("estimate", "--model", LLAMA_70B, "--node", "2*rtx3090")
    assert "fit on no node" in " ".join(said.split())
    assert "nothing to say of speed" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", LLAMA_70B, "--node", "rtx9090"), "--node rtx9090: 'rtx9090' is neither a size such as 24GB"),
        (("--node", "24GB"), "name the model that the nodes would serve"),
        (("--model", "not-there", "--node", "24GB"), "does not exist"),
        (("--model", "not-there.json", "--node", "24GB"), "not-there.json cannot be read"),
        (("--model", LLAMA_70B, "--node", "24GB", "--context", "9000"), "was made for 8192 tokens, not for 9000"),
        (("--tracker", "127.0.0.1:1"), "no tracker answers at 127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], said: str) -> None:
    error = refused(*arguments)
    assert said in error
    assert "Traceback" not in error


def test_of_a_mesh_that_runs(tmp_path: Path) -> None:
    weights = save_tiny_llama(tmp_path / "tiny")
    manifest = read_manifest(ModelFiles("tiny", weights))
    room = room_for(NUM_LAYERS // 2)
    with running_mesh(
        [f"tiny={weights}"], [NodeSpec("a", room, tracker_node=True), NodeSpec("b", room)], kv_tokens=KV_TOKENS
    ) as mesh:
        mesh.wait_for(lambda t: len([n for n in t.nodes.values() if n.speeds]) == 2, "both have measured their speed")
        where = ("--tracker", mesh.tracker_address)
        assert "serves no model: name one with --model; known models: tiny" in refused(*where)
        assert "does not know model 'other'; known models: tiny" in refused(*where, "--model", "other")
        told = json.loads(
            meshnet("estimate", *where, "--model", "tiny", "--kv-tokens", str(KV_TOKENS), "--prompt", "64", "--json")
        )
        assert shards(told) == {"a": [(0, 3)], "b": [(3, 6)]}
        assert told["kv_tokens"] == KV_TOKENS
        assert told["token_seconds"] > 0
        assert [node["weight_bytes"] for node in told["nodes"]] == [
            manifest.entry.bfloat16 + 3 * manifest.layers[0].bfloat16, 3 * manifest.layers[0].bfloat16,
        ]  # fmt: skip
        meshnet("deploy", "tiny", "--kv-tokens", str(KV_TOKENS), *where)
        mesh.wait_until_complete("tiny")
        assert mesh.layers("tiny") == {"a": ["0-3"], "b": ["3-6"]}
        assert shards(json.loads(meshnet("estimate", *where, "--json"))) == shards(told)
