"""Who may ask this gateway for anything."""

from __future__ import annotations

from quart import request

from meshnet.errors import Unauthenticated
from meshnet.security.shared_secret import HEADER, SharedSecret


def shows_secret(secret: SharedSecret | None) -> bool:
    """Whether the running request shows the secret of the mesh, if it has one."""
    if secret is None:
        return True
    try:
        secret.check(request.headers.get(HEADER))
    except Unauthenticated:
        return False
    return True
