"""Which sessions live on this node, how long they are, and which frame may run next. Pure: no clock, no waiting.

Lengths here count what has been *handed to* the thread that owns the weights. It runs the work of a session in the
order in which it was handed over, so a frame that continues at this length is safe to hand over at once.

What an ended session has cached may be kept, for others to begin with. It is no session any more, and its room is free
to whoever needs it. What must be done with KV caches for that is in `take_works`: it is to be handed over at once,
before anything else is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshnet.errors import PositionMismatch
from meshnet.model import BLOCK_TOKENS, LayerRange
from meshnet.wire import Prefix
from services.node.core.kv_ledger import KvLedger
from services.node.core.work import CacheWork, FreeWork, KeepWork, ReuseWork, SessionKey


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one session that a frame brings. `position` None: where the cache ends now."""

    key: SessionKey
    position: int | None
    num_tokens: int


@dataclass(slots=True)
class _Session:
    """`entry`: the node at which the session begins, if that is another one and it has said so."""

    length: int
    last_used: float
    entry: str | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """`length`: whole blocks. `entry`: as of the session."""

    length: int
    last_used: float
    entry: str | None


class SessionTable:
    """All sessions of a node, and the KV room that each of its models has for them."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, _Session] = {}
        self._kept: dict[SessionKey, _Kept] = {}
        self._works: list[CacheWork] = []
        self._ledgers: defaultdict[str, KvLedger] = defaultdict(KvLedger)

    def __len__(self) -> int:
        """Number of sessions; one that runs through two layer ranges here counts once."""
        return len({key.session for key in self._sessions})

    def __contains__(self, key: object) -> bool:
        return key in self._sessions

    def ledger(self, model_id: str) -> KvLedger:
        return self._ledgers[model_id]

    def open(self, key: SessionKey, num_tokens: int, now: float, prefix: Prefix | None = None) -> None:
        """Begins a session here with KV room for `num_tokens` in all, and with that prefix if it is here: then it is as
        long. Raises KvFull and changes nothing."""
        source = self._source(key, prefix, entry=None)
        self._ledgers[key.model_id].check_room(key, num_tokens)
        self._give_up([key])
        if source and prefix:
            self._begin_with(source, key, prefix, num_tokens, now)
        else:
            self._reserve_one(key, num_tokens)
        session = self._sessions.setdefault(key, _Session(0, now))
        session.last_used = now
        if source and prefix:
            session.length = prefix.num_tokens

    def accept(
        self,
        pieces: Sequence[Piece],
        *,
        first_chunk: bool,
        now: float,
        entry: str | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[int, ...] | None:
        """The positions at which the pieces of a frame go on, or None if an earlier chunk has yet to arrive.

        All pieces are accepted or none. A piece before the end of its cache cuts the cache back. Raises
        PositionMismatch for a gap that no chunk on its way can fill, KvFull if there is no room. `entry` is the node at
        which the sessions begin, if that is another one. With a `prefix` there is one piece, which goes on behind that.
        """
        source = self._source(pieces[0].key, prefix, entry)
        positions = tuple(self._position(piece) for piece in pieces)
        for piece, position in zip(pieces, positions, strict=True):
            length = prefix.num_tokens if source and prefix else self.length(piece.key)
            if position > length and not first_chunk:
                return None
            if position > length:
                raise PositionMismatch(
                    f"session {piece.key.session} has {length} tokens cached here, the frame is for {position}",
                    length,
                )
        self._give_up([piece.key for piece in pieces])
        if source and prefix:
            total = positions[0] + pieces[0].num_tokens
            self._ledgers[source.model_id].check_room(pieces[0].key, total)
            self._begin_with(source, pieces[0].key, prefix, total, now)
        self._reserve(pieces, positions)
        for piece, position in zip(pieces, positions, strict=True):
            session = self._sessions.setdefault(piece.key, _Session(0, now))
            session.length, session.last_used = position + piece.num_tokens, now
            session.entry = entry or session.entry
        return positions

    def length(self, key: SessionKey) -> int:
        """Tokens of the session that are cached here or are handed over to be."""
        session = self._sessions.get(key)
        return session.length if session else 0

    def kept_length(self, key: SessionKey) -> int:
        """Tokens, whole blocks, that are kept of an ended session."""
        kept = self._kept.get(key)
        return kept.length if kept else 0

    @property
    def num_kept(self) -> int:
        """Ended sessions of which something is kept."""
        return len({key.session for key in self._kept})

    def keys_of(self, session: str) -> tuple[SessionKey, ...]:
        """Of a session that runs, or of which something is kept."""
        return tuple(key for key in (*self._sessions, *self._kept) if key.session == session)

    def keys_from(self, entry: str) -> tuple[SessionKey, ...]:
        """Sessions, and what is kept of others, that began at that other node."""
        return (
            *(key for key, session in self._sessions.items() if session.entry == entry),
            *(key for key, kept in self._kept.items() if kept.entry == entry),
        )

    def keys_through(self, model_id: str, layers: LayerRange) -> tuple[SessionKey, ...]:
        """Sessions whose KV cache has some of these layers."""
        return tuple(key for key in self._sessions if key.model_id == model_id and key.layers.overlaps(layers))

    def kept_through(self, model_id: str, layers: LayerRange) -> tuple[SessionKey, ...]:
        """What is kept that has some of these layers."""
        return tuple(key for key in self._kept if key.model_id == model_id and key.layers.overlaps(layers))

    def kept_since(self, moment: float) -> tuple[SessionKey, ...]:
        """What is kept and has not been used since then."""
        return tuple(key for key, kept in self._kept.items() if kept.last_used < moment)

    def idle_since(self, moment: float) -> tuple[SessionKey, ...]:
        """Sessions that nothing has touched since then."""
        return tuple(key for key, session in self._sessions.items() if session.last_used < moment)

    def close(self, keys: Sequence[SessionKey]) -> None:
        """Forgets sessions, and what is kept of others, and gives their KV room back. Unknown ones are no error."""
        for key in keys:
            if self._sessions.pop(key, None):
                self._ledgers[key.model_id].release(key)
            if self._kept.pop(key, None):
                self._ledgers[key.model_id].give_up(key)
        self._works.append(FreeWork(tuple(keys)))

    def keep(self, key: SessionKey, num_tokens: int, now: float) -> None:
        """Ends a session, and keeps the whole blocks of its first tokens, if it has so many. Unknown ones are no
        error."""
        session = self._sessions.get(key)
        if session is None:
            return
        num_kept = num_tokens - num_tokens % BLOCK_TOKENS
        if not 0 < num_kept <= session.length:
            self.close([key])
            return
        del self._sessions[key]
        self._ledgers[key.model_id].keep(key, num_kept // BLOCK_TOKENS)
        self._kept[key] = _Kept(num_kept, now, session.entry)
        self._works.append(KeepWork(key, num_kept))

    def take_works(self) -> tuple[CacheWork, ...]:
        """What is to be done with the KV caches by all that was called since, in this order."""
        works = tuple(self._works)
        self._works.clear()
        return works

    def free_tokens(self) -> int:
        """KV room that is left, in tokens: of the model that has the least."""
        return min((ledger.free_tokens for ledger in self._ledgers.values() if ledger.capacity_tokens), default=0)

    def check_integrity(self) -> None:
        """Raises AssertionError if a ledger does not add up."""
        assert self._sessions.keys().isdisjoint(self._kept)
        for ledger in self._ledgers.values():
            ledger.check_integrity()

    def _position(self, piece: Piece) -> int:
        return self.length(piece.key) if piece.position is None else piece.position

    def _reserve(self, pieces: Sequence[Piece], positions: Sequence[int]) -> None:
        try:
            for piece, position in zip(pieces, positions, strict=True):
                self._reserve_one(piece.key, position + piece.num_tokens)
        except Exception:
            for piece in pieces:
                if piece.key not in self._sessions:
                    self._ledgers[piece.key.model_id].release(piece.key)
            raise

    def _reserve_one(self, key: SessionKey, num_tokens: int) -> None:
        self._free_kept(self._ledgers[key.model_id].reserve(key, num_tokens))

    def _source(self, key: SessionKey, prefix: Prefix | None, entry: str | None) -> SessionKey | None:
        """What a session is to begin with, if it is here, comes from the same entry node and is long enough. None for a
        session that has begun already."""
        if prefix is None or key in self._sessions:
            return None
        source = replace(key, session=prefix.session)
        found = self._kept.get(source) or self._sessions.get(source)
        return source if found and found.entry == entry and found.length >= prefix.num_tokens else None

    def _begin_with(self, source: SessionKey, key: SessionKey, prefix: Prefix, num_tokens: int, now: float) -> None:
        """Gives a new session its room for `num_tokens`, for which there must be enough, and its first tokens.

        What is kept is taken, even if it was to be copied, when there is no room for both.
        """
        ledger = self._ledgers[key.model_id]
        take = prefix.take and source in self._kept
        if take:
            ledger.give_up(source)
        ledger.use(source)
        given_up = ledger.reserve(key, num_tokens)
        take = take or source in given_up
        self._free_kept(other for other in given_up if other != source)
        self._works.append(ReuseWork(source, key, prefix.num_tokens, take))
        if take:
            del self._kept[source]
        elif kept := self._kept.get(source):
            self._kept[source] = replace(kept, last_used=now)

    def _give_up(self, keys: Iterable[SessionKey]) -> None:
        """A session of the same name begins: nothing is kept of the one before."""
        kept = [key for key in keys if key in self._kept]
        for key in kept:
            self._ledgers[key.model_id].give_up(key)
        self._free_kept(kept)

    def _free_kept(self, keys: Iterable[SessionKey]) -> None:
        """The room is counted as free already."""
        if freed := tuple(keys):
            for key in freed:
                del self._kept[key]
            self._works.append(FreeWork(freed))
