"""Which addresses others can reach."""

from __future__ import annotations

from collections.abc import Mapping

from meshnet.addresses import is_loopback, split_address


def exposed(listens: Mapping[str, str]) -> dict[str, str]:
    """Of options and the HOST:PORT that they say to listen at: those that are not on loopback. Raises InvalidRequest.

    Names other than localhost count as such, whatever they stand for at the moment.
    """
    return {option: listen for option, listen in listens.items() if not is_loopback(split_address(listen, 0)[0])}
