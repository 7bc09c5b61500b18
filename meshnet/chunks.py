"""How a prompt is cut into chunks that travel one behind the other."""

from __future__ import annotations

from meshnet.model import BLOCK_TOKENS

# As many as a session takes a block of KV cache for.
CHUNK_TOKENS = BLOCK_TOKENS
# A step of so many is faster by the token: it reads the weights once.
LARGE_CHUNK_TOKENS = 256
# Large ones keep later stages waiting for longer, which is only little of the time where so many come to each stage.
LARGE_CHUNKS_A_STAGE = 4
# Of one prompt under way at once: enough to keep a long pipeline full, few enough to bound its memory.
MAX_CHUNKS_IN_FLIGHT = 16


def chunk_tokens(num_tokens: int, num_stages: int) -> int:
    """Of a prompt of so many tokens that passes so many stages."""
    fits = num_tokens >= LARGE_CHUNKS_A_STAGE * num_stages * LARGE_CHUNK_TOKENS
    return LARGE_CHUNK_TOKENS if fits else CHUNK_TOKENS
