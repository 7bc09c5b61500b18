"""What a proxy does to what passes through it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto


class Way(Flag):
    """Which way bytes go: to the server that the proxy stands before, or to its clients."""

    NONE = 0
    TO_SERVER = auto()
    TO_CLIENT = auto()
    BOTH = TO_SERVER | TO_CLIENT


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The default passes all on as it is. Faults may be combined; sizes are in bytes, times in seconds.

    `refuses`: nobody listens; connections that stand go on. `resets`: those that stand are reset at once, and new ones
    when they are accepted. `stalls`: that way nothing passes, on old connections and on new ones, and nobody is told;
    what was held goes on when it ends. `delay`: that all takes, each way, however much is on its way. `cuts_after`: so
    many bytes of the next answers of a connection, then that is closed. `stalls_after`: so many bytes of all answers,
    then nothing more comes. `corrupts`: in every such body, requests and answers counted together, a bit is flipped;
    `corrupts_anywhere`: in every such piece of a connection, whatever it is a piece of. `duplicates`: every such
    request goes to the server once more, over a connection of its own, and nobody sees that answer. `reorders`: one
    request is held back until a later one has passed, so long at most.
    """

    refuses: bool = False
    resets: bool = False
    stalls: Way = Way.NONE
    delay: float = 0.0
    cuts_after: int | None = None
    stalls_after: int | None = None
    corrupts: int | None = None
    corrupts_anywhere: int | None = None
    duplicates: int | None = None
    reorders: float | None = None


PASS = Behaviour()
REFUSE = Behaviour(refuses=True)
RESET = Behaviour(resets=True)
STALL = Behaviour(stalls=Way.BOTH)
