"""Whether there is room for a shard before it is loaded. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.sizes import format_size


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes. `held`: of the shards that are loaded. `workspace`: what their steps take, None: not measured.
    `device_free`: what is really free of the device's memory, None: nobody knows."""

    lent: int
    held: int
    workspace: int | None
    device_free: int | None


def shortage(room: Room, weights: int, kv: int, workspace: int) -> str | None:
    """Why a shard that is predicted to take so many bytes must not be loaded; None if there is room for it.

    One step runs at a time, so that of several shards' workspace only the largest counts; what it takes of the device
    is free between steps.
    """
    needed = weights + kv
    free = max(0, room.lent - room.held - max(room.workspace or 0, workspace))
    parts = f"{format_size(weights)} of weights, {format_size(kv)} of KV cache"
    if needed > free:
        steps = format_size(max(room.workspace or 0, workspace))
        return (
            f"it takes {parts}; of the {format_size(room.lent)} that this node lends, {format_size(room.held)} are "
            f"held, steps take {steps}, and {format_size(free)} are free"
        )
    if room.device_free is not None and needed + workspace > room.device_free:
        return (
            f"it takes {parts} and {format_size(workspace)} for its steps, together {format_size(needed + workspace)}; "
            f"{format_size(room.device_free)} of the device's memory are free"
        )
    return None
