"""The texts of a model's tokens, as gateways give them to entry nodes, and the name by which both know them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.errors import InvalidRequest

# Vocabularies of a few hundred thousand tokens are the largest known. They cross the wire as one message.
MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 1 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """`tokens`: bytes of each token, by id, as they stand in a text; as many as the model has logits. Empty: it is
    never written. `special_token_ids`, ascending: tokens that are no text, whatever their bytes."""

    vocabulary_id: str
    tokens: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]


def vocabulary_of(tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> Vocabulary:
    """Names a vocabulary. Tokens that are too long to be of use count as never written."""
    held = tuple(token if len(token) <= MAX_TOKEN_BYTES else b"" for token in tokens)
    special = tuple(sorted(special_token_ids))
    return Vocabulary(vocabulary_id(held, special), held, special)


def vocabulary_id(tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> str:
    """SHA-256 in hexadecimal digits, over little-endian numbers of 4 bytes and tokens: how many tokens there are, each
    one's length and bytes, how many special ones there are, and the id of each."""
    digest = hashlib.sha256(struct.pack("<I", len(tokens)))
    for token in tokens:
        digest.update(struct.pack("<I", len(token)) + token)
    digest.update(struct.pack(f"<{1 + len(special_token_ids)}I", len(special_token_ids), *special_token_ids))
    return digest.hexdigest()


def check_vocabulary(vocabulary: Vocabulary) -> None:
    """Raises InvalidRequest for one that is not what its id says, or of no use."""
    num_tokens, special = len(vocabulary.tokens), vocabulary.special_token_ids
    if not 0 < num_tokens <= MAX_TOKENS:
        raise InvalidRequest(f"a vocabulary has from 1 to {MAX_TOKENS} tokens, not {num_tokens}")
    if (longest := max(map(len, vocabulary.tokens))) > MAX_TOKEN_BYTES:
        raise InvalidRequest(f"a token of {longest} bytes is over the limit of {MAX_TOKEN_BYTES}")
    if len(special) > num_tokens or (special and max(special) >= num_tokens):
        raise InvalidRequest(f"the special tokens are not all among the {num_tokens} of the vocabulary")
    found = vocabulary_id(vocabulary.tokens, special)
    if found != vocabulary.vocabulary_id:
        raise InvalidRequest(f"the vocabulary is {found}, not {vocabulary.vocabulary_id[:80]!r}")
