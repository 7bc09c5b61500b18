"""What a generation tells whoever reads it, and how far it has come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from services.node.core.recovery import Recovery
from services.node.core.request import Emitted

# Tokens that may wait for a slow reader of the stream before its generation pauses.
MAX_UNREAD_TOKENS = 64

# None only wakes the reader.
Event = Emitted | None


class Progress:
    """Of a generation over all its attempts."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self.generated: list[int] = []
        self.has_begun = False
        # Some of the prompt, at least, has passed the whole route.
        self.has_computed = False
        self._events: asyncio.Queue[Event] = asyncio.Queue(MAX_UNREAD_TOKENS)

    async def put(self, event: Emitted, num_reused: int) -> None:
        """What has come. `num_reused` tokens of the prompt were not computed, which the first event tells."""
        if not self.has_begun:
            event = replace(event, cached_tokens=num_reused)
        self.has_begun = True
        if event.token_id is not None:
            self.generated.append(event.token_id)
        self.recovery.progressed()
        await self._events.put(event)

    async def until_done(self, task: asyncio.Task[None]) -> AsyncGenerator[Emitted, None]:
        """What comes, until the task that puts it here has ended and all is read. Raises what the task raised."""
        task.add_done_callback(lambda _: self._wake())
        while True:
            if task.done() and self._events.empty():
                break
            event = await self._events.get()
            if isinstance(event, Emitted):
                yield event
        if not task.cancelled():
            task.result()

    def _wake(self) -> None:
        if not self._events.full():
            self._events.put_nowait(None)
