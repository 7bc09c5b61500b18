"""What a gateway process is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshnet.model_files import HubModel, ModelFiles
from meshnet.security.shared_secret import SharedSecret


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`tracker` is `host:port`; times are in seconds.

    `models` are the models whose tokenizer files are at hand. `request_timeout` bounds one whole generation,
    `resume_timeout` the time from a failure under it to its next token;
    `write_timeout` is how long a client may leave what it was sent unread; `stream_silence` how long nothing comes on a
    stream before a comment is sent, with which a stream also begins if its first token is late. `secret`: to be shown
    by clients and to the mesh, if any.
    """

    tracker: str
    host: str
    port: int
    models: Mapping[str, ModelFiles | HubModel]
    request_timeout: float = 600.0
    resume_timeout: float = 60.0
    write_timeout: float = 60.0
    stream_silence: float = 15.0
    # Longer than clients keep idle connections in their pools, so that it is never the server that closes first.
    keep_alive_timeout: float = 120.0
    body_timeout: float = 60.0
    shutdown_timeout: float = 1.0
    max_body_bytes: int = 16 * 1024 * 1024
    max_requests_in_flight: int = 512
    secret: SharedSecret | None = None
