"""What steps take of memory beside weights and KV caches, before it has been measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from meshnet.model import (
    BLOCK_TOKENS,
    LayerRange,
    LayerStep,
    ModelManifest,
    Quantization,
    WeightBytes,
    Workspace,
    blocks_for,
)
from services.node.core.batching import TOKEN_BUDGET
from services.node.core.speculation import MAX_STEP_TOKENS

# Allocators leave gaps between what they hand out: measured 1.2 to 1.4, where the figures below are from above.
_GAPS = 1.2
# What the libraries keep of the kernels that they compile for the shapes of a model.
_KERNEL_BYTES = 8 << 20
# Scores that torch's own kernels do not make: in float32, as they are, with what is added, and as weights.
_SCORE_BYTES = 4 * 3
# So many of them at a time, though at least those of one token.
SCORE_VALUES = 1 << 23
# What is widened to bfloat16 to be multiplied is copied once more by the CPU's kernels. NF4 weights are widened where
# no kernel takes them as they are.
_WIDENED_BYTES, _NF4_WIDENED_BYTES = 4, 2
# INT8 weights are widened so many at a time, and so are those of an LM head that is not a layer of its own.
INT8_PIECE_VALUES = 1 << 21
HEAD_PIECE_VALUES = 1 << 22
# Below this, the number of tokens hardly changes what a step takes.
FEWEST_TOKENS = 1024


def predict_workspace_bytes(
    manifest: ModelManifest,
    quantization: Quantization,
    kv_tokens: int,
    *,
    entry: bool,
    layers: LayerRange | None = None,
) -> int:
    """The most that a step takes with KV room for `kv_tokens` tokens, through the layer that takes most of `layers`
    (default: all of the model); on an entry node at least the logits of all sessions.
    """
    longest = min(kv_tokens, manifest.context_length)
    steps = _steps(manifest, (layers or manifest.all_layers).layers)
    most = max(_layer_bytes(step, quantization, longest) for step in steps)
    if entry:
        most = max(most, _entry_bytes(manifest, quantization, kv_tokens))
    return _KERNEL_BYTES + int(_GAPS * most)


def predicted_workspaces(manifest: ModelManifest) -> tuple[Workspace, ...]:
    """For whoever places layers of the model: for each power of two up to its context length."""
    sizes = [FEWEST_TOKENS]
    while sizes[-1] < manifest.context_length:
        sizes.append(2 * sizes[-1])
    return tuple(Workspace(tokens, workspace_at_each_precision(manifest, tokens, entry=True)) for tokens in sizes)


def workspace_at_each_precision(manifest: ModelManifest, kv_tokens: int, *, entry: bool) -> WeightBytes:
    """As `predict_workspace_bytes` says of the whole model."""
    predicted = {q.value: predict_workspace_bytes(manifest, q, kv_tokens, entry=entry) for q in Quantization}
    return WeightBytes(**predicted)


def largest_step(manifest: ModelManifest, layers: LayerRange, quantization: Quantization, kv_tokens: int) -> int:
    """The layer a step through which takes most; the first of equal ones."""
    longest = min(kv_tokens, manifest.context_length)
    sizes = [_layer_bytes(step, quantization, longest) for step in _steps(manifest, layers.layers)]
    return layers.start + sizes.index(max(sizes))


def _steps(manifest: ModelManifest, layers: Iterable[int]) -> list[LayerStep]:
    """Of a model whose files are elsewhere a rough figure: each layer as one matrix of as many weights a channel."""
    if manifest.steps:
        return [manifest.steps[layer] for layer in layers]
    hidden = manifest.hidden_size
    weights = [manifest.layers[layer].bfloat16 // 2 for layer in layers]
    return [LayerStep(count // hidden + 3 * hidden, count // 3) for count in weights]


def _layer_bytes(step: LayerStep, quantization: Quantization, longest: int) -> int:
    """As many tokens as are batched, those of one chunk at the end of the longest session."""
    value_bytes = 4 if quantization is Quantization.FLOAT32 else 2
    seen = longest if step.window is None else min(longest, step.window + BLOCK_TOKENS)
    mask = value_bytes * BLOCK_TOKENS * seen
    a_token = step.score_heads * seen
    scores = _SCORE_BYTES * min(a_token * BLOCK_TOKENS, max(SCORE_VALUES, a_token))
    activations = TOKEN_BUDGET * step.values * value_bytes
    return max(activations + _widened_bytes(step, quantization), scores) + mask


def _widened_bytes(step: LayerStep, quantization: Quantization) -> int:
    match quantization:
        case Quantization.INT8:
            # And what comes out is scaled in float32.
            return _WIDENED_BYTES * min(step.largest_linear, INT8_PIECE_VALUES) + TOKEN_BUDGET * step.values
        case Quantization.NF4:
            return _NF4_WIDENED_BYTES * step.largest_linear
        case _:
            return 0


def _entry_bytes(manifest: ModelManifest, quantization: Quantization, kv_tokens: int) -> int:
    # Those of drafts count too, and each session has a block at least.
    rows = min(max(blocks_for(kv_tokens), MAX_STEP_TOKENS), TOKEN_BUDGET)
    if quantization is Quantization.FLOAT32:
        return 4 * rows * manifest.vocab_size
    head = _WIDENED_BYTES * min(manifest.vocab_size * manifest.hidden_size, HEAD_PIECE_VALUES)
    return 2 * rows * manifest.vocab_size + head
