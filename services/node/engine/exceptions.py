"""What single architectures need beside the common mechanism. Each exception names whom it is for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from services.node.engine.attention import ATTENTION, attend
from services.node.engine.segments import Segments


def register(model_type: str) -> None:
    """Before a model of this type is built. Again is no harm."""
    if model_type == "falcon":
        _register_falcon()


def adapt(layer: nn.Module) -> nn.Module:
    """A layer that takes what all layers are given, and returns its hidden states alone."""
    adapted = {"FalconDecoderLayer": FalconLayer, "StableLmDecoderLayer": StableLmLayer}.get(type(layer).__name__)
    return layer if adapted is None else adapted(layer)


def compute_buffers(module: nn.Module, device: torch.device) -> None:
    """Gives values to what a module computes when it is made: on the meta device it could not.

    Gemma's embedding holds its scale.
    """
    scale = getattr(module, "scalar_embed_scale", None)
    if scale is not None:
        module.register_buffer("embed_scale", torch.tensor(scale, device=device), persistent=False)


class FalconLayer(nn.Module):
    """Falcon's layers hand attention nothing but what they know: the segments go in as what they take for a cache."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
        **_: object,
    ) -> torch.Tensor:
        output: torch.Tensor = self.layer(
            hidden,
            alibi=None,
            attention_mask=None,
            position_ids=position_ids,
            layer_past=segments,
            position_embeddings=position_embeddings,
        )[0]
        return output


class StableLmLayer(nn.Module):
    """StableLM's layers hand attention nothing but what they know, while their attention hands on what it is given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, segments: Segments, **options: object) -> torch.Tensor:
        attention: Any = self.layer.self_attn
        attention.forward = partial(type(attention).forward, attention, segments=segments)
        try:
            output: torch.Tensor = self.layer(hidden, **options)
        finally:
            del attention.forward
        return output


def _register_falcon() -> None:
    """Falcon knows no attention interface but has a table of attention classes of its own."""
    from transformers.models.falcon import modeling_falcon  # a second, and only these models need it

    class PackedFalconAttention(modeling_falcon.FalconAttention):  # type: ignore[misc]  # the library is untyped
        def forward(
            self,
            hidden: torch.Tensor,
            *,
            layer_past: Segments,
            position_embeddings: tuple[torch.Tensor, torch.Tensor],
            **_: Any,
        ) -> tuple[torch.Tensor, None]:
            groups = self.num_kv_heads if self.new_decoder_architecture or self.multi_query else self.num_heads
            # All three ways to fuse them: of each group its queries, then its key, then its value.
            fused = self.query_key_value(hidden)
            fused = fused.view(1, fused.shape[1], groups, self.num_heads // groups + 2, self.head_dim)
            query = fused[..., :-2, :].flatten(2, 3).transpose(1, 2)
            key, value = (fused[..., part, :].transpose(1, 2) for part in (-2, -1))
            query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
            output, _nothing = attend(self, query, key, value, None, segments=layer_past)
            return self.dense(output.flatten(2)), None

    if ATTENTION not in modeling_falcon.FALCON_ATTENTION_CLASSES:
        modeling_falcon.FALCON_ATTENTION_CLASSES[ATTENTION] = PackedFalconAttention
