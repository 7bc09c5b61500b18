"""What steps take of memory beside weights and KV caches, before it has been measured. Pure."""

from __future__ import annotations

from meshnet.model import BLOCK_TOKENS, ModelManifest, Quantization, blocks_for
from services.node.core.batching import TOKEN_BUDGET

# The sums of int8 products are integers of four bytes before they are scaled.
_VALUE_BYTES = {Quantization.BFLOAT16: 2, Quantization.NF4: 2, Quantization.INT8: 4, Quantization.FLOAT32: 4}
# Hidden states that are held beside: what came in, what is added to it, before and after a norm.
_HIDDEN_COPIES = 4


def predict_workspace_bytes(
    manifest: ModelManifest, quantization: Quantization, cached_tokens: int, *, entry: bool
) -> int:
    """A rough figure for the largest step, of which one session is `cached_tokens` long.

    The outputs of all linear layers of one layer at once (as many values a token as the layer has weights a channel),
    some hidden states, and a mask over the long session; on an entry node at least the logits of all sessions.
    """
    outputs = manifest.layers[0].bfloat16 // 2 // manifest.hidden_size * _VALUE_BYTES[quantization]
    token_bytes = outputs + 2 * _HIDDEN_COPIES * manifest.hidden_size
    layer_bytes = TOKEN_BUDGET * token_bytes + 2 * BLOCK_TOKENS * cached_tokens
    rows = min(blocks_for(cached_tokens), TOKEN_BUDGET)
    return max(layer_bytes, 2 * rows * manifest.vocab_size if entry else 0)
