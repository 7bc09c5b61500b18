"""What a GGUF file states of its model, one thing at a time. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from meshnet.errors import BadFiles, LoadFailed
from services.node.files.gguf_header import HeaderReader, gguf_tensors, header_value

# Keys that change what a model computes, with the values that do not. In a file of an architecture whose config they do
# not go into, they would be lost, and the model would be silently wrong.
_TELLING: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (),
    "attention.scale": (),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0,),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_count_swa": (),
    "rope.dimension_sections": (),
    "rope.freq_base_swa": (),
    # As other programs than llama.cpp write for Gemma 3.
    "rope.global.freq_base": (),
    "rope.local.freq_base": (),
    "rope.scale_linear": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swiglu_clamp_exp": (),
}


class Facts:
    """What a file states of its model, and of which of it was made use. `factors`: see `gguf_config`."""

    def __init__(self, reader: HeaderReader, factors: Mapping[str, list[float]]) -> None:
        self.architecture = str(header_value(reader, "general.architecture"))
        self.tensors = gguf_tensors(reader)
        self._reader = reader
        self._factors = factors
        self._used: set[str] = set()

    def value(self, key: str) -> Any:
        """Under a key behind the architecture's name. None: it is not stated."""
        self._used.add(key)
        return header_value(self._reader, f"{self.architecture}.{key}")

    def size(self, key: str) -> int:
        value = self.value(key)
        if isinstance(value, list):
            raise LoadFailed(f"the GGUF file gives {key} layer by layer, which is not supported")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadFiles(f"the GGUF file gives {key} as {value!r}, which is no size")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise BadFiles(f"the GGUF file gives {key} as {value!r}, which is no number")
        return value

    def has(self, name: str) -> bool:
        """Whether there is such a tensor in the first layer."""
        return f"blk.0.{name}" in self.tensors

    def factors(self, name: str, count: int) -> list[float]:
        """The values of a small tensor which go into the config."""
        values = self._factors.get(name) or self._tensor_values(name)
        if len(values) != count or not all(math.isfinite(value) and value > 0 for value in values):
            raise BadFiles(f"tensor {name!r} of the GGUF file does not hold {count} rotary factors")
        return values

    def head_dim(self) -> int:
        """What llama.cpp takes where the file does not say."""
        return self.size("attention.key_length") if self.value("attention.key_length") else self._divided_head_dim()

    def check_divided_head_dim(self) -> None:
        if self.head_dim() != self._divided_head_dim():
            raise LoadFailed("the GGUF file gives a head size that models of its architecture cannot have")

    def check_used(self) -> None:
        for key, harmless in _TELLING.items():
            if key not in self._used and (value := self.value(key)) is not None and value not in harmless:
                raise LoadFailed(
                    f"the GGUF file states {key} = {value!r}, which is not supported for its architecture; use the "
                    "safetensors directory"
                )

    def _divided_head_dim(self) -> int:
        """Raises BadFiles if there is nothing to divide."""
        size = self.size("embedding_length") // self.size("attention.head_count")
        if not size:
            raise BadFiles("the GGUF file has more heads than its hidden states have values")
        return size

    def _tensor_values(self, name: str) -> list[float]:
        (tensor,) = [tensor for tensor in self._reader.tensors if tensor.name == name]
        try:
            return [float(value) for value in np.ravel(gguf.dequantize(tensor.data, tensor.tensor_type))]
        except (NotImplementedError, ValueError) as error:
            raise BadFiles(f"tensor {name!r} of the GGUF file cannot be read: {error}") from error
