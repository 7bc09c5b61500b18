"""`meshnet estimate`: how fast a mesh would be, of machines that may not exist yet or of one that runs.

The plan is a tracker's own: that of the running mesh, or one that is started for the purpose and told of the machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated

import typer

from meshnet.admin import DeployWish
from meshnet.cli.admin_client import admin_client
from meshnet.cli.estimate_picture import estimate_picture
from meshnet.cli.models import read_headers
from meshnet.cli.options import (
    DEFAULT_TRACKER,
    ContextOption,
    JsonOption,
    KvOption,
    KvTokensOption,
    ReplicasOption,
    SessionsOption,
    TrackerOption,
)
from meshnet.cli.output import console, print_json
from meshnet.cli.scratch_tracker import scratch_tracker
from meshnet.errors import InvalidRequest, UnknownModel
from meshnet.estimate.mesh import Estimate, Questions, estimate
from meshnet.estimate.planned import planned
from meshnet.estimate.presets import PRESETS
from meshnet.estimate.spec import NodeSpec, parse_nodes
from meshnet.estimate.surroundings import node_of_spec, surroundings_of_mesh, surroundings_of_specs
from meshnet.model import BLOCK_TOKENS, KvPrecision, ModelManifest, blocks_for
from meshnet.security.options import SecretOption
from meshnet.security.shared_secret import SharedSecret
from meshnet.topology import DeployedModel

_NODE_HELP = (
    "A machine, the tracker-node first; repeatable. 24GB, or one of "
    f"{', '.join(PRESETS)}, or KEY=VALUE with commas: name, memory, quantization (bfloat16+int8), bandwidth (40GB/s), "
    "compute (2TFLOPS), layer (0.1ms that each layer takes on top), link (1Gbit/s), delay (0.2ms), and of nodes that "
    "share a machine: machine (its name), cores, shared (20GB/s that they read together). 4*SPEC: several."
)


def estimate_command(
    model: Annotated[
        str | None,
        typer.Option(
            help="ID=PATH or PATH of a Hugging Face directory, of a GGUF file or of a config.json alone; hf:ORG/NAME; "
            "or without --node a model that the mesh knows. Default there: the first that is deployed."
        ),
    ] = None,
    node: Annotated[list[str] | None, typer.Option(help=_NODE_HELP, metavar="SPEC")] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(help="Length of a prompt in tokens; repeatable. Default: 512 and 2048.", min=1)
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens that a session gets as an answer.", min=1)] = 256,
    streams: Annotated[
        list[int] | None, typer.Option(help="Sessions at once; repeatable. Default: 1, 4, 16 and 64.", min=1)
    ] = None,
    kv_tokens: KvTokensOption = None,
    kv: KvOption = KvPrecision.BFLOAT16,
    context: ContextOption = None,
    sessions: SessionsOption = None,
    replicas: ReplicasOption = None,
    tracker: TrackerOption = DEFAULT_TRACKER,
    secret: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate how fast a mesh would be: its shards, memory, prompts, tokens a second.

    With --node of machines that may not exist yet; without, of the mesh of --tracker, with what its nodes measured.
    """
    questions = Questions(tuple(prompt or (512, 2048)), tuple(streams or (1, 4, 16, 64)), new_tokens)
    wish = DeployWish(model or "", kv_tokens or 0, 0, context or 0, sessions or 0, replicas or 0, kv)
    try:
        told = (
            _of_specs(model, parse_nodes(node), wish, questions, secret)
            if node
            else _of_mesh(tracker, wish, questions, secret)
        )
    except (InvalidRequest, UnknownModel) as error:
        typer.echo(f"meshnet estimate: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        print_json(asdict(told))
    else:
        console.print(estimate_picture(told, questions))


def _of_specs(
    model: str | None, specs: Sequence[NodeSpec], wish: DeployWish, questions: Questions, secret: SharedSecret | None
) -> Estimate:
    if model is None:
        raise InvalidRequest("name the model that the nodes would serve: --model PATH")
    surroundings = surroundings_of_specs(specs)
    manifest = read_headers(model).manifest
    model_id = manifest.model_id
    # Its tracker has the secret where that is in the environment.
    with scratch_tracker() as address, admin_client(address, secret) as client:
        for index, spec in enumerate(specs):
            is_first = index == 0
            client.register(node_of_spec(spec, manifest, is_first=is_first), [manifest] if is_first else [])
        client.deploy(replace(wish, model_id=model_id))
        topology, preview = client.topology(), client.plan()
    settled = planned(topology, preview.directives, topology.models[model_id])
    return estimate(settled, model_id, surroundings, questions, preview.shortfalls)


def _of_mesh(tracker: str, wish: DeployWish, questions: Questions, secret: SharedSecret | None) -> Estimate:
    """Of a model as it is deployed, or as it is wished for if it is not, or if something is wished for."""
    with admin_client(tracker, secret) as client:
        topology, manifests = client.topology(), client.manifests()
        model_id = wish.model_id or next(iter(sorted(topology.models)), "")
        if model_id not in manifests:
            known = ", ".join(sorted(manifests)) or "none"
            asked = f"does not know model {model_id!r}" if model_id else "serves no model: name one with --model"
            raise UnknownModel(f"the mesh at {tracker} {asked}; known models: {known}")
        wish = replace(wish, model_id=model_id)
        model = topology.models.get(model_id)
        if model is None or wish != DeployWish(model_id):
            model = _wished(manifests[model_id], wish)
            preview = client.plan(deploy=wish)
        else:
            preview = client.plan()
    surroundings = surroundings_of_mesh(topology, model_id, manifests)
    settled = planned(topology, preview.directives, model)
    return estimate(settled, model_id, surroundings, questions, preview.shortfalls)


def _wished(manifest: ModelManifest, wish: DeployWish) -> DeployedModel:
    """As a tracker would deploy it, which has agreed to the wish if it has made a plan for it."""
    context = wish.context_length or manifest.context_length
    room = blocks_for(wish.kv_tokens or context) * BLOCK_TOKENS * (wish.sessions or 1)
    return DeployedModel(manifest, room, wish.priority, context, wish.replicas or None, kv_precision=wish.kv_precision)
