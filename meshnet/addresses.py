"""`host:port` texts."""

from __future__ import annotations

import ipaddress

from meshnet.errors import InvalidRequest

WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})


def split_address(address: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of `host:port` or `[ipv6]:port`. Raises InvalidRequest."""
    host, colon, port = address.rpartition(":")
    if not colon or "]" in port:
        host, port = address, "" if default_port is None else str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"{address!r} is not an address: write HOST:PORT, for example 127.0.0.1:7700")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Names other than localhost are none, whatever they stand for: anybody can register 127.example.net."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
