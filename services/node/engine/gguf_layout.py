"""Undoes what the conversion to GGUF did to the layout of tensors, or to their values.

What was done is in llama.cpp's `conversion/` folder. It serves that project's kernels: so have the rows of a llama's
queries and keys another order in the file than in the Hugging Face directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch

from services.node.files.model_config import Config, model_shape

# (stored tensor, config) -> the tensor as the module holds it.
Restore = Callable[[torch.Tensor, Config], torch.Tensor]


def restore(stored: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """`tensor` is what is stored under the name `stored`. Raises RuntimeError if it does not have that shape."""
    for names, change in _LAYOUTS.get(config["model_type"], ()):
        if names.search(stored):
            return change(tensor, config)
    return tensor


def join_expert(parts: Sequence[torch.Tensor], config: Config) -> torch.Tensor:
    """One expert's projection, weight or bias, of the tensors that it is stored in."""
    if config["model_type"] != "gpt_oss":
        return torch.cat(list(parts))
    # Gate and up are stored apart, and belong row by row beside each other; weights are stored as [out, in].
    joined = torch.stack(list(parts), dim=1).flatten(0, 1)
    return joined.T if joined.ndim == 2 else joined


def _transpose(tensor: torch.Tensor, _: Config) -> torch.Tensor:
    return tensor.T


def _minus_one(tensor: torch.Tensor, _: Config) -> torch.Tensor:
    return tensor - 1.0


def _as_row(tensor: torch.Tensor, _: Config) -> torch.Tensor:
    return tensor.reshape(1, -1)


def _unpermute_queries(tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return _unpermute(tensor, config["num_attention_heads"])


def _unpermute_keys(tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return _unpermute(tensor, model_shape(config).kv_heads)


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves of each head that a llama's rotary embedding pairs; puts them apart again."""
    half = tensor.shape[0] // heads // 2
    return tensor.view(heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _group(tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """From all queries, then all keys, then all values, to groups of heads that hold their own of each."""
    shape = model_shape(config)
    queries = config["num_attention_heads"] // shape.kv_heads
    rest = tensor.shape[1:]
    sizes = [queries * shape.kv_heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2]
    parts = [part.reshape(shape.kv_heads, -1, shape.head_dim, *rest) for part in torch.split(tensor, sizes)]
    return torch.cat(parts, dim=1).reshape(tensor.shape)


_INTERLEAVED = (
    (re.compile(r"\.attn_q\."), _unpermute_queries),
    (re.compile(r"\.attn_k\."), _unpermute_keys),
)
_FUSED = ((re.compile(r"\.attn_qkv\."), _group),)
# The module adds one to the weight that it holds.
_CENTRED = ((re.compile(r"norm\.weight$"), _minus_one),)
_LAYOUTS: Mapping[str, Sequence[tuple[re.Pattern[str], Restore]]] = {
    "falcon": _FUSED,
    "gemma": _CENTRED,
    "gemma2": _CENTRED,
    "gemma3_text": _CENTRED,
    # Stored as [out, in], while the modules are Conv1D, which hold [in, out].
    "gpt2": ((re.compile(r"\.(?:attn_qkv|attn_output|ffn_up|ffn_down)\.weight$"), _transpose),),
    "gpt_neox": _FUSED,
    "granite": _INTERLEAVED,
    "llama": _INTERLEAVED,
    "mixtral": _INTERLEAVED,
    "olmo": _INTERLEAVED,
    "qwen2_moe": ((re.compile(r"\.ffn_gate_inp_shexp\."), _as_row),),
    "smollm3": _INTERLEAVED,
}
