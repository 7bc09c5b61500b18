"""What steps take of memory beside weights and KV caches, before it has been measured. Pure."""

from __future__ import annotations

from meshnet.model import ModelManifest
from services.node.core.batching import TOKEN_BUDGET
from services.node.core.kv_ledger import BLOCK_TOKENS, blocks_for


def predict_workspace_bytes(manifest: ModelManifest, cached_tokens: int, *, entry: bool) -> int:
    """A rough figure for the largest step, of which one session is `cached_tokens` long.

    The outputs of all linear layers of one layer at once (as many values a token as the layer has weights a channel),
    in bfloat16, and a mask over the long session; on an entry node at least the logits of all sessions.
    """
    values_per_token = manifest.layers[0].bfloat16 // 2 // manifest.hidden_size
    layer_bytes = 2 * TOKEN_BUDGET * values_per_token + 2 * BLOCK_TOKENS * cached_tokens
    rows = min(blocks_for(cached_tokens), TOKEN_BUDGET)
    return max(layer_bytes, 2 * rows * manifest.vocab_size if entry else 0)
