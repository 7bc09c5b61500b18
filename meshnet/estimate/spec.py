"""Machines as people describe them: `--node rtx4090`, `--node 3*memory=64GB,bandwidth=40GB/s,compute=2TFLOPS`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshnet.errors import InvalidRequest
from meshnet.estimate.hardware import Hardware
from meshnet.estimate.pipeline import UNSHARED, Machine
from meshnet.estimate.presets import DEFAULT_PRESET, PRESETS
from meshnet.estimate.units import parse_byte_rate, parse_compute, parse_count, parse_link_rate, parse_time
from meshnet.model import Quantization, parse_quantizations
from meshnet.sizes import parse_size
from meshnet.topology import check_node_id

DEFAULT_LINK_BYTES_PER_SECOND = 1e9 / 8
DEFAULT_DELAY_SECONDS = 0.0002
MAX_NODES = 1000

_COUNTED = re.compile(r"\s*(\d+)\s*[*x]\s*(.+)", re.DOTALL)

_KEYS: Mapping[str, Callable[[str], Any]] = {
    "name": check_node_id,
    "memory": parse_size,
    "quantization": parse_quantizations,
    "bandwidth": parse_byte_rate,
    "compute": parse_compute,
    "layer": parse_time,
    "link": parse_link_rate,
    "delay": parse_time,
    "machine": check_node_id,
    "cores": parse_count,
    "shared": parse_byte_rate,
}


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node that may not exist yet. `link_bytes_per_second` is of its link to all others, `delay_seconds` the time of
    a byte from it to another node like it. Nodes of one `machine` have no link between them, and share what `shared`
    says it has. `own_memory`: of that they do not share the memory."""

    node_id: str
    memory_bytes: int
    hardware: Hardware
    quantizations: tuple[Quantization, ...] = (Quantization.BFLOAT16,)
    link_bytes_per_second: float = DEFAULT_LINK_BYTES_PER_SECOND
    delay_seconds: float = DEFAULT_DELAY_SECONDS
    machine: str = ""
    shared: Machine = UNSHARED
    own_memory: bool = False

    @property
    def machine_id(self) -> str:
        """Alone on a machine it gives its name to it."""
        return self.machine or self.node_id


def parse_nodes(texts: Iterable[str]) -> tuple[NodeSpec, ...]:
    """The nodes of some SPECs, the tracker-node's first. Raises InvalidRequest, which names the SPEC."""
    nodes: list[NodeSpec] = []
    for text in texts:
        try:
            nodes += _nodes(text)
        except InvalidRequest as error:
            raise InvalidRequest(f"--node {text}: {error}") from None
        if len(nodes) > MAX_NODES:
            raise InvalidRequest(f"--node {text}: that makes more than {MAX_NODES} nodes")
    numbers = _numbers(len(nodes))
    nodes = [node if node.node_id else replace(node, node_id=f"node-{numbers[i]}") for i, node in enumerate(nodes)]
    names = [node.node_id for node in nodes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidRequest(f"two nodes are named {twice[0]!r}")
    return tuple(nodes)


def machines_of(nodes: Iterable[NodeSpec]) -> dict[str, Machine]:
    """What the nodes of each machine share. Its memory is read as fast as the fastest node alone reads it, unless a
    SPEC says how fast all together do; cards have their own. Raises InvalidRequest if two SPECs say otherwise."""
    by_machine: dict[str, list[NodeSpec]] = {}
    for node in nodes:
        by_machine.setdefault(node.machine_id, []).append(node)
    return {name: _shared(name, members) for name, members in by_machine.items() if members[0].machine}


def _shared(name: str, members: list[NodeSpec]) -> Machine:
    cores = {node.shared.cores for node in members if node.shared.cores is not None}
    rates = {node.shared.bytes_per_second for node in members if node.shared.bytes_per_second is not None}
    if len(cores) > 1 or len(rates) > 1:
        raise InvalidRequest(f"the nodes of machine {name!r} differ in cores= or shared=, which are of the machine")
    alone = max((node.hardware.bytes_per_second for node in members if not node.own_memory), default=None)
    return Machine(next(iter(cores), None), next(iter(rates), alone))


def _nodes(text: str) -> list[NodeSpec]:
    """Without names where the SPEC gives none."""
    counted = _COUNTED.fullmatch(text)
    count, text = (int(counted[1]), counted[2]) if counted else (1, text)
    if not 1 <= count <= MAX_NODES:
        raise InvalidRequest(f"{count} nodes are not between 1 and {MAX_NODES}")
    stated = _stated(text)
    name = stated.pop("name", "")
    spec = _spec(stated)
    if count == 1 or not name:
        return [replace(spec, node_id=name)] * count
    return [replace(spec, node_id=check_node_id(f"{name}-{number}")) for number in _numbers(count)]


def _numbers(count: int) -> list[str]:
    """From 0 on, as long as each other, so that they sort as they count."""
    return [f"{number:0{len(str(count - 1))}}" for number in range(count)]


def _stated(text: str) -> dict[str, Any]:
    """Values by key. A part without a key is a preset or a size of memory."""
    stated: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            key, value = ("preset" if key.lower() in PRESETS else "memory"), key
        if key in stated:
            raise InvalidRequest(f"{key} is there twice")
        stated[key] = _value(key, value, bare=not equals)
    return stated


def _value(key: str, value: str, *, bare: bool) -> Any:
    if key == "preset":
        return PRESETS[value.lower()]
    if key not in _KEYS:
        raise InvalidRequest(f"{key!r} is no property of a node: use {', '.join(_KEYS)}, or one of {_preset_names()}")
    try:
        return _KEYS[key](value)
    except InvalidRequest as error:
        if bare:
            raise InvalidRequest(
                f"{value!r} is neither a size such as 24GB nor one of {_preset_names()}, nor has it a key as in "
                "memory=24GB"
            ) from None
        raise InvalidRequest(f"{key}: {error}") from None


def _spec(stated: dict[str, Any]) -> NodeSpec:
    _check(stated)
    preset = stated.get("preset") or PRESETS[DEFAULT_PRESET]
    hardware = Hardware(
        stated.get("bandwidth", preset.hardware.bytes_per_second),
        stated.get("compute", preset.hardware.flops_per_second),
        stated.get("layer", preset.hardware.layer_seconds),
    )
    return NodeSpec(
        node_id="",
        memory_bytes=stated.get("memory", preset.memory_bytes),
        hardware=hardware,
        quantizations=stated.get("quantization", (Quantization.BFLOAT16,)),
        link_bytes_per_second=stated.get("link", DEFAULT_LINK_BYTES_PER_SECOND),
        delay_seconds=stated.get("delay", DEFAULT_DELAY_SECONDS),
        machine=stated.get("machine", ""),
        shared=Machine(stated.get("cores"), stated.get("shared")),
        own_memory=preset.own_memory,
    )


def _check(stated: Mapping[str, Any]) -> None:
    if "preset" not in stated and "memory" not in stated:
        raise InvalidRequest(f"how much memory does it lend? Write memory=24GB, or one of {_preset_names()}")
    if stated.get("memory", 1) < 1:
        raise InvalidRequest("memory: a node lends more than nothing")
    if ("bandwidth" in stated) != ("compute" in stated) and "preset" not in stated:
        raise InvalidRequest("bandwidth and compute go together: of which machine would the other be?")
    if {"cores", "shared"} & stated.keys() and "machine" not in stated:
        raise InvalidRequest("cores and shared are of a machine that nodes share: name it with machine=NAME")


def _preset_names() -> str:
    return ", ".join(PRESETS)
