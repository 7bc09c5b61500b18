"""Tensors of a GGUF file under their Hugging Face names, dequantized a block of rows at a time."""

from __future__ import annotations

import mmap
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from meshnet.errors import BadFiles
from services.node.engine.gguf_layout import join_expert, restore
from services.node.files.manifest import COMPUTED
from services.node.files.model_config import Config

# Rows are dequantized to float32 this many values at a time: bounds what a tensor costs beside its result.
_BLOCK_VALUES = 1 << 22

# Those that the library calls otherwise than the config does.
_GGUF_NAMES = {
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}

# transformers stacks all experts of a projection, gate and up in one; the file stacks them too, gate and up apart.
_EXPERTS = re.compile(r"\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias)?$")
_STACKS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
# StableLM has a norm for each head; the file stacks them.
_HEAD_NORM = re.compile(r"^(.+\.self_attn\.[qk]_layernorm)\.norms\.(\d+)\.weight$")


@dataclass(frozen=True, slots=True)
class _Place:
    """The stored tensors that make up one; a single `row` of them, or stacks of experts."""

    stored: tuple[str, ...]
    row: int | None = None
    stacks: bool = False


class GgufSource:
    """A WeightSource (see services.node.engine.weights) over an opened GGUF file.

    `present`: stored names of the tensors that may be read, where the file has holes; None: all.
    """

    def __init__(
        self, reader: gguf.GGUFReader, config: Config, num_layers: int, present: Collection[str] | None = None
    ) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._present = self._tensors.keys() if present is None else present
        self._file = reader.data._mmap
        self._config = config
        model_type = config["model_type"]
        self._names = gguf.get_tensor_name_map(_ARCHITECTURES[_GGUF_NAMES.get(model_type, model_type)], num_layers)

    def holds(self, name: str) -> bool:
        return self._find(name) is not None

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        place = self._find(name)
        if place is None:
            raise BadFiles(f"the GGUF file lacks the tensor {name!r}")
        if place.stacks:
            experts = range(int(self._tensors[place.stored[0]].shape[-1]))
            return torch.stack([self.read_expert(name, expert, dtype) for expert in experts])
        (stored,) = place.stored
        tensor = self._values(stored, dtype, place.row)
        try:
            return restore(stored, tensor, self._config).to(dtype)
        except RuntimeError as error:
            raise BadFiles(f"tensor {stored!r} of the GGUF file has an impossible shape: {error}") from error

    def read_expert(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        place = self._find(name)
        if place is None or not place.stacks:
            raise BadFiles(f"the GGUF file lacks expert {expert} of the tensor {name!r}")
        parts = [self._values(stored, dtype, expert) for stored in place.stored]
        try:
            return join_expert(parts, self._config).to(dtype)
        except RuntimeError as error:
            raise BadFiles(f"the experts of {name!r} have different shapes in the GGUF file: {error}") from error

    def leftovers(self, names: Collection[str]) -> frozenset[str]:
        known = {stored for name in names if (place := self._find(name)) for stored in place.stored}
        return frozenset(name for name in self._tensors if name not in known and not COMPUTED.search(name))

    def _find(self, name: str) -> _Place | None:
        place = self._locate(name)
        return place if place and all(stored in self._tensors for stored in place.stored) else None

    def _locate(self, name: str) -> _Place | None:
        if match := _EXPERTS.search(name):
            layer, projection, kind = match[1], match[2], "bias" if match[3] else "weight"
            return _Place(tuple(f"blk.{layer}.{stack}.{kind}" for stack in _STACKS[projection]), stacks=True)
        if match := _HEAD_NORM.match(name):
            stored, row = self._names.get_name(match[1]), int(match[2])
            return _Place((f"{stored}.weight",), row) if stored else None
        module, _, kind = name.rpartition(".")
        # The sinks of attention are a parameter of their own, and no module's weight.
        module, kind = (name, "weight") if kind == "sinks" else (module, kind)
        stored = self._names.get_name(module)
        return _Place((f"{stored}.{kind}",)) if stored else None

    def _values(self, stored: str, dtype: torch.dtype, row: int | None) -> torch.Tensor:
        """A stored tensor, or one slice of it along its first dimension. Vectors are left in float32."""
        if stored not in self._present:
            raise BadFiles(f"tensor {stored!r} has not been fetched")
        tensor = self._tensors[stored]
        data, shape = tensor.data, tuple(int(size) for size in reversed(tensor.shape))
        if row is not None:
            if len(shape) < 2 or row >= shape[0]:
                raise BadFiles(f"tensor {stored!r} of the GGUF file has the shape {shape}, and no slice {row}")
            data, shape = data[row], shape[1:]
        try:
            values = _dequantize(data, shape, tensor.tensor_type, dtype if len(shape) > 1 else torch.float32)
        except (NotImplementedError, ValueError) as error:
            raise BadFiles(f"tensor {stored!r} of the GGUF file cannot be dequantized: {error}") from error
        # What was read of a mapped file counts as the process's memory for as long as it is mapped.
        if hasattr(mmap, "MADV_DONTNEED"):
            self._file.madvise(mmap.MADV_DONTNEED)
        return values


def _dequantize(
    data: npt.NDArray[Any], shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, dtype: torch.dtype
) -> torch.Tensor:
    result = torch.empty(shape, dtype=dtype)
    if len(shape) < 2:
        return result.copy_(_float32(data, kind))
    rows = max(1, _BLOCK_VALUES // max(1, result[:1].numel()))
    for start in range(0, shape[0], rows):
        result[start : start + rows] = _float32(data[start : start + rows], kind)
    return result


def _float32(data: npt.NDArray[np.generic], kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    values = gguf.dequantize(data, kind)
    # Unquantized values come back as a view of the file, which torch does not take read-only.
    return torch.from_numpy(np.array(values) if not values.flags.writeable else values)
