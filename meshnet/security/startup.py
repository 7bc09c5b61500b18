"""What a service may listen at. Nothing is open to others by accident."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from meshnet.errors import InvalidRequest
from meshnet.security.exposure import exposed
from meshnet.security.shared_secret import SharedSecret

log = logging.getLogger(__name__)


def check_listens(listens: Mapping[str, str], secret: SharedSecret | None, *, insecure: bool) -> None:
    """`listens`: HOST:PORT by the option that says it. Raises InvalidRequest if others could use what they should not.

    `insecure`: somebody has said that they may.
    """
    opened = exposed(listens)
    if not opened or secret:
        return
    told = ", ".join(f"{option} {listen}" for option, listen in opened.items())
    if not insecure:
        raise InvalidRequest(
            f"{told} can be reached from other machines, and there is no token: anybody there could use this mesh, "
            "read what passes through it and give it orders. Make a token with `meshnet token FILE`, copy the file to "
            "every machine of the mesh and name it with --token-file FILE or MESHNET_TOKEN_FILE. Or listen at "
            "127.0.0.1. Or say --insecure, if everybody who can reach this machine may do all of that"
        )
    log.warning(
        "INSECURE: there is no token, so whoever can reach %s can use this mesh, read what passes through it and give "
        "it orders",
        told,
    )
