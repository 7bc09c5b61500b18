"""Prefix reuse at the entry node: which session a prompt continues, and what is kept of one that ends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from meshnet.model import BLOCK_TOKENS
from meshnet.routing import Route
from meshnet.wire import Prefix
from services.node.core.batching import DECODED_TOKENS
from services.node.core.prefixes import Match, Name, PrefixTable
from services.node.core.work import SessionKey
from services.node.forwarding import Forwarding
from services.node.generation import Sequence

# The session that would be continued may take so long to end, else it is as if it had. It ends in one round trip.
SETTLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A new session on its route, and the names of its blocks: others may begin with all of them, it with the first
    `num_reused` at most."""

    key: SessionKey
    route: Route
    names: tuple[Name, ...]
    num_reused: int

    @property
    def reused(self) -> tuple[Name, ...]:
        return self.names[: self.num_reused]


class PrefixReuse:
    """`enabled` False: nothing is ever found or kept."""

    def __init__(self, forwarding: Forwarding, *, enabled: bool) -> None:
        self._forwarding = forwarding
        self._enabled = enabled
        self._table = PrefixTable(secrets.token_bytes(32))
        self._ending: dict[SessionKey, asyncio.Task[None]] = {}

    def wanted(self, key: SessionKey, route: Route, prompt: Items[int], *, reuses: bool = True) -> Wanted:
        """Of a prompt its whole blocks, but never its last token, whose output is needed. `reuses` False: others may
        begin with them, but this session computes them itself.

        It always computes more tokens than are decoded at once: fewer would be rounded like those.
        """
        names = self._table.names(key.model_id, prompt[:-1]) if self._enabled else ()
        num_reused = max(0, len(prompt) - 1 - DECODED_TOKENS) // BLOCK_TOKENS
        return Wanted(key, route, names, num_reused if reuses else 0)

    async def until_settled(self, wanted: Wanted) -> None:
        """Waits for the end of the session that would be continued: its last token may have been read before its hops
        know that there are no more."""
        match = self._table.find(wanted.route, wanted.reused)
        if match and (ending := self._ending.get(match.key)):
            await asyncio.wait([ending], timeout=SETTLE_SECONDS)

    def open(self, wanted: Wanted, num_tokens: int) -> Prefix | None:
        """Opens the session with room for `num_tokens` in all. Returns what it begins with. Raises KvFull."""
        prefix = self._find(wanted)
        self._forwarding.open(wanted.key, num_tokens, prefix)
        # What the session of that name had before is gone.
        self._table.forget(wanted.key)
        if prefix and not self._is_here(source := replace(wanted.key, session=prefix.session)):
            # Taken, if only because there is no room for both. So it is to go on the hops too.
            self._table.forget(source)
            return replace(prefix, take=True)
        return prefix

    def prefilled(self, wanted: Wanted, sequence: Sequence) -> None:
        """All nodes of the route have the whole prompt: others may begin with it too."""
        self._forget_lost(wanted, sequence)
        self._table.put(wanted.key, wanted.route, wanted.names)

    async def end(self, wanted: Wanted, sequence: Sequence, emitted: Items[int], *, keep: bool) -> None:
        """Ends a session on all nodes of its route. What they all have of it is kept, if it is to be."""
        # Cancelled or not, it comes to its end.
        await asyncio.shield(self.begin_end(wanted, sequence, emitted, keep=keep))

    def begin_end(self, wanted: Wanted, sequence: Sequence, emitted: Items[int], *, keep: bool) -> asyncio.Future[None]:
        """As `end`, for those who have no time: a hop may be mute."""
        self._forget_lost(wanted, sequence)
        tokens = sequence.cached_tokens(emitted) if keep and self._enabled and not self._forwarding.draining else ()
        names = self._table.names(wanted.key.model_id, tokens)
        self._table.put(wanted.key, wanted.route, names)
        ending = asyncio.ensure_future(sequence.close(len(names) * BLOCK_TOKENS))
        self._ending[wanted.key] = ending
        ending.add_done_callback(lambda done: self._ended(wanted.key, done))
        return ending

    def check_integrity(self) -> None:
        """Raises AssertionError if the table of prefixes does not add up."""
        self._table.check_integrity()

    def _find(self, wanted: Wanted) -> Prefix | None:
        while match := self._table.find(wanted.route, wanted.reused):
            if match.key != wanted.key and (prefix := self._prefix(match)):
                return prefix
            # It has been given up, or is about to be written over.
            self._table.forget(match.key)
        return None

    def _prefix(self, match: Match) -> Prefix | None:
        sessions = self._forwarding.sessions
        if sessions.kept_length(match.key) >= match.num_tokens:
            return Prefix(match.key.session, match.num_tokens, take=match.is_whole)
        if sessions.length(match.key) >= match.num_tokens:
            return Prefix(match.key.session, match.num_tokens, take=False)
        return None

    def _forget_lost(self, wanted: Wanted, sequence: Sequence) -> None:
        if sequence.prefix and sequence.prefix_lost:
            self._table.forget(replace(wanted.key, session=sequence.prefix.session))

    def _ended(self, key: SessionKey, ending: asyncio.Task[None]) -> None:
        if self._ending.get(key) is ending:
            del self._ending[key]
        # Nobody may be there any more to hear of an error.
        _ = ending.cancelled() or ending.exception()
        # The table is as large as what is kept.
        for known in self._table.keys:
            if not self._is_here(known):
                self._table.forget(known)

    def _is_here(self, key: SessionKey) -> bool:
        return key in self._forwarding.sessions or self._forwarding.sessions.kept_length(key) > 0
