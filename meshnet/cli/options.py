"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from meshnet.model import KvPrecision

DEFAULT_TRACKER = "127.0.0.1:7700"

TrackerOption = Annotated[str, typer.Option("--tracker", help="Tracker, HOST:PORT.", envvar="MESHNET_TRACKER")]
JsonOption = Annotated[bool, typer.Option("--json", help="All of it as JSON, for programs.")]
KvTokensOption = Annotated[
    int | None,
    typer.Option(help="Tokens that each shard's KV cache has room for. Default: the model's context length.", min=1),
]
KvOption = Annotated[
    KvPrecision, typer.Option("--kv", help="How KV caches are stored. int8 takes about half, and changes answers.")
]
PriorityOption = Annotated[int, typer.Option(help="Placed in falling order when memory is short.")]
ContextOption = Annotated[
    int | None,
    typer.Option(help="Longest sequence to serve, in tokens. Default: what the model was made for.", min=1),
]
SessionsOption = Annotated[
    int | None,
    typer.Option(help="Instead of --kv-tokens: sessions of that length that there is room for.", min=1),
]
ReplicasOption = Annotated[
    int | None, typer.Option(help="Most replicas of a layer. Default: as many as there is room for.", min=1)
]
