"""When a generation goes on after a failure, and through which nodes not. Pure; times are in seconds.

::

    dead, slow  a hop failed or was mute (HopFailure)         another route, without that node
    broken      a hop made values that are not finite         the same; the second that says so ends it
    busy        a hop had no room or leaves (Busy)            any route, a little later
    wrong       a hop has other layers or another position    any route, at once; twice in a row is no accident
    else        the request itself, or this node              it ends
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshnet.errors import BrokenNode, Busy, HopFailure, MeshnetError, PositionMismatch, WrongLayers
from services.node.core.request import GenerationRequest

# A node that failed is passed again after this long, and before that if a probe came through it.
AVOID_SECONDS = 10.0
MAX_WRONG = 2
MAX_BROKEN = 2
# One that fails again and again at once, while routes are there.
MAX_ATTEMPTS = 16


class Recovery:
    """Of one generation. A failure opens a time of `timeout` seconds, in which the next token must come."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._avoided_until: dict[str, float] = {}
        self._num_wrong = self._num_attempts = 0
        self._broken: set[str] = set()
        self.deadline: float | None = None
        """Of the next token; None: nothing has failed since the last one."""

    def progressed(self) -> None:
        """A token is there."""
        self.deadline = None
        self._num_wrong = self._num_attempts = 0

    def failed(self, error: MeshnetError, now: float, *, has_begun: bool) -> float:
        """Seconds to wait before the next attempt. Raises the error if there is to be none. `has_begun`: some token is
        there already, so that nobody else can take the request over from the beginning."""
        self.deadline = self.deadline or now + self._timeout
        self._num_attempts += 1
        if now >= self.deadline or self._num_attempts >= MAX_ATTEMPTS:
            raise error
        if isinstance(error, BrokenNode):
            self._broken.add(error.node_id)
            if len(self._broken) >= MAX_BROKEN:
                raise error
        if isinstance(error, HopFailure):
            self._avoided_until[error.node_id] = now + AVOID_SECONDS
            return 0.0
        if isinstance(error, PositionMismatch | WrongLayers):
            self._num_wrong += 1
            if self._num_wrong < MAX_WRONG:
                return 0.0
        if isinstance(error, Busy) and has_begun:
            return error.retry_after
        raise error

    def avoided(self, now: float) -> frozenset[str]:
        """Nodes that are not to be passed now."""
        return frozenset(node_id for node_id, until in self._avoided_until.items() if now < until)


def rest_of(
    request: GenerationRequest, generated: Sequence[int], request_id: str, *, has_begun: bool
) -> GenerationRequest:
    """What is left of a generation, under a name of its own: hops may still be busy with the session before. Once it
    `has_begun`, the logprobs of its prompt are told."""
    return replace(
        request,
        request_id=request_id,
        prompt=(*request.prompt, *generated),
        max_new_tokens=request.max_new_tokens - len(generated),
        num_generated=request.num_generated + len(generated),
        prompt_logprobs=request.prompt_logprobs and not has_begun,
    )
