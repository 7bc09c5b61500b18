"""What sessions that began here have cached, by its tokens: so that a prompt finds what it begins with. Pure.

A block of 128 tokens is named by a hash over it and the name of the block before it, so that one name stands for all
tokens up to its end. Names never leave the node, and begin with a secret: nobody can make two prompts of one name.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.model import BLOCK_TOKENS
from meshnet.routing import Route
from services.node.core.work import SessionKey

Name = bytes


@dataclass(frozen=True, slots=True)
class Match:
    """A session that begins as a prompt does. `is_whole`: nothing that is known of it is left out."""

    key: SessionKey
    num_tokens: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class _Left:
    route: Route
    names: tuple[Name, ...]


class PrefixTable:
    """Sessions, ended or not, by the names of the blocks that are in their KV caches on all nodes of their route.

    Invariant (`check_integrity`): each session is found by each of its names, and by no other.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._left: dict[SessionKey, _Left] = {}
        # In the order in which they came.
        self._by_name: defaultdict[tuple[Route, Name], dict[SessionKey, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._left)

    @property
    def keys(self) -> tuple[SessionKey, ...]:
        return tuple(self._left)

    def names(self, model_id: str, tokens: Sequence[int]) -> tuple[Name, ...]:
        """Of the whole blocks of a prompt to this model."""
        name = hashlib.sha256(self._secret + model_id.encode()).digest()
        names = []
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            # Of a fixed width, so that no two blocks are the same bytes.
            name = hashlib.sha256(name + array("Q", tokens[start : start + BLOCK_TOKENS]).tobytes()).digest()
            names.append(name)
        return tuple(names)

    def put(self, key: SessionKey, route: Route, names: tuple[Name, ...]) -> None:
        """The session has these blocks, and no others."""
        self.forget(key)
        if names:
            self._left[key] = _Left(route, names)
            for name in names:
                self._by_name[route, name][key] = None

    def forget(self, key: SessionKey) -> None:
        """It has none any longer. Unknown ones are no error."""
        if (left := self._left.pop(key, None)) is None:
            return
        for name in left.names:
            found = self._by_name[left.route, name]
            del found[key]
            if not found:
                del self._by_name[left.route, name]

    def find(self, route: Route, names: Sequence[Name]) -> Match | None:
        """Of the sessions on that route that begin with the most of these blocks: one that has no others, if there is
        one, else the latest."""
        for count in range(len(names), 0, -1):
            found = self._by_name.get((route, names[count - 1]))
            if found:
                whole = [key for key in found if len(self._left[key].names) == count]
                key = whole[-1] if whole else next(reversed(found))
                return Match(key, count * BLOCK_TOKENS, bool(whole))
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError if a session is found by what it does not have, or not by what it has."""
        wanted = {(left.route, name, key) for key, left in self._left.items() for name in left.names}
        assert wanted == {(route, name, key) for (route, name), found in self._by_name.items() for key in found}
        assert all(self._by_name.values())
