"""The bytes of one token, as they stand in the text.

What a vocabulary calls a token is not its text: byte-level vocabularies write each byte as a printable character, and
those of sentencepiece write a space as `▁` and single bytes as `<0xE2>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Callable with a token id. Ids that the vocabulary does not have are no bytes."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._decode = _decoder(backend)
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes(token_id)
        return known

    def _bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._decode(token)


def _decoder(backend: Tokenizer) -> Callable[[str], bytes]:
    steps = list(_steps(json.loads(backend.decoder.__getstate__()))) if backend.decoder is not None else []
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    replaced = [
        (pattern["String"], str(step["content"]))
        for step in steps
        if step.get("type") == "Replace" and "String" in (pattern := step["pattern"])
    ]
    replaced += [(str(step["replacement"]), " ") for step in steps if step.get("type") == "Metaspace"]
    return lambda token: _pieces(token, replaced, "ByteFallback" in kinds)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _pieces(token: str, replaced: list[tuple[str, str]], byte_fallback: bool) -> bytes:
    if byte_fallback and (match := _BYTE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    for old, new in replaced:
        token = token.replace(old, new)
    return token.encode()


def _byte_level(token: str) -> bytes:
    if any(character not in _BYTES for character in token):
        return token.encode()
    return bytes(_BYTES[character] for character in token)


def _byte_characters() -> dict[str, int]:
    """GPT-2's: printable characters stand for themselves, other bytes for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
