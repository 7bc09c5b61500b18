"""Which sessions live on this node, how long they are, and which frame may run next. Pure: no clock, no waiting.

Lengths here count what has been *handed to* the thread that owns the weights. It runs the work of a session in the
order in which it was handed over, so a frame that continues at this length is safe to hand over at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshnet.errors import PositionMismatch
from meshnet.model import LayerRange
from services.node.core.kv_ledger import KvLedger
from services.node.core.work import SessionKey


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


class SessionTable:
    """All sessions of a node, and the KV room that each of its models has for them."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, _Session] = {}
        self._ledgers: defaultdict[str, KvLedger] = defaultdict(KvLedger)

    def __len__(self) -> int:
        """Number of sessions; one that runs through two layer ranges here counts once."""
        return len({key.session for key in self._sessions})

    def __contains__(self, key: object) -> bool:
        return key in self._sessions

    def ledger(self, model_id: str) -> KvLedger:
        return self._ledgers[model_id]

    def open(self, key: SessionKey, num_tokens: int, now: float) -> None:
        """Begins a session with KV room for `num_tokens` in all. Raises KvFull and changes nothing."""
        self._ledgers[key.model_id].reserve(key, num_tokens)
        self._sessions.setdefault(key, _Session(0, now)).last_used = now

    def accept(
        self, pieces: Sequence[Piece], *, first_chunk: bool, now: float, entry: str | None = None
    ) -> tuple[int, ...] | None:
        """The positions at which the pieces of a frame go on, or None if an earlier chunk has yet to arrive.

        All pieces are accepted or none. A piece before the end of its cache cuts the cache back. Raises
        PositionMismatch for a gap that no chunk on its way can fill, KvFull if there is no room. `entry` is the node at
        which the sessions begin, if that is another one.
        """
        positions = tuple(self._position(piece) for piece in pieces)
        for piece, position in zip(pieces, positions, strict=True):
            length = self.length(piece.key)
            if position > length and not first_chunk:
                return None
            if position > length:
                raise PositionMismatch(
                    f"session {piece.key.session} has {length} tokens cached here, the frame is for {position}",
                    length,
                )
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

    def keys_of(self, session: str) -> tuple[SessionKey, ...]:
        return tuple(key for key in self._sessions if key.session == session)

    def keys_from(self, entry: str) -> tuple[SessionKey, ...]:
        """Sessions that begin at that other node."""
        return tuple(key for key, session in self._sessions.items() if session.entry == entry)

    def keys_through(self, model_id: str, layers: LayerRange) -> tuple[SessionKey, ...]:
        """Sessions whose KV cache has some of these layers."""
        return tuple(key for key in self._sessions if key.model_id == model_id and key.layers.overlaps(layers))

    def idle_since(self, moment: float) -> tuple[SessionKey, ...]:
        """Sessions that nothing has touched since then."""
        return tuple(key for key, session in self._sessions.items() if session.last_used < moment)

    def close(self, keys: Iterable[SessionKey]) -> None:
        """Forgets sessions and gives their KV room back. Unknown ones are no error."""
        for key in keys:
            if self._sessions.pop(key, None):
                self._ledgers[key.model_id].release(key)

    def free_tokens(self) -> int:
        """KV room that is left, in tokens: of the model that has the least."""
        return min((ledger.free_tokens for ledger in self._ledgers.values() if ledger.capacity_tokens), default=0)

    def check_integrity(self) -> None:
        """Raises AssertionError if a ledger does not add up."""
        for ledger in self._ledgers.values():
            ledger.check_integrity()

    def _position(self, piece: Piece) -> int:
        return self.length(piece.key) if piece.position is None else piece.position

    def _reserve(self, pieces: Sequence[Piece], positions: Sequence[int]) -> None:
        try:
            for piece, position in zip(pieces, positions, strict=True):
                self._ledgers[piece.key.model_id].reserve(piece.key, position + piece.num_tokens)
        except Exception:
            for piece in pieces:
                if piece.key not in self._sessions:
                    self._ledgers[piece.key.model_id].release(piece.key)
            raise
