"""Tensors of a GGUF file under their Hugging Face names, dequantized a block of rows at a time."""

from __future__ import annotations

import mmap
from collections.abc import Collection

import gguf
import numpy as np
import numpy.typing as npt
import torch

from meshnet.errors import BadFiles
from services.node.files.model_config import Config

# Rows are dequantized to float32 this many values at a time: bounds what a tensor costs beside its result.
_BLOCK_VALUES = 1 << 22

_ARCHITECTURES = {
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
# Stored [out, in], while the Hugging Face modules are Conv1D, which hold [in, out].
_GPT2_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


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
        self._names = gguf.get_tensor_name_map(_ARCHITECTURES[config["model_type"]], num_layers)

    def holds(self, name: str) -> bool:
        return self._stored_name(name) is not None

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored_name(name)
        if stored is None:
            raise BadFiles(f"the GGUF file lacks the tensor {name!r}")
        if stored not in self._present:
            raise BadFiles(f"tensor {stored!r} has not been fetched")
        try:
            tensor = _dequantize(self._tensors[stored], dtype)
        except (NotImplementedError, ValueError) as error:
            raise BadFiles(f"tensor {stored!r} of the GGUF file cannot be dequantized: {error}") from error
        # What was read of a mapped file counts as the process's memory for as long as it is mapped.
        if hasattr(mmap, "MADV_DONTNEED"):
            self._file.madvise(mmap.MADV_DONTNEED)
        return self._restore_layout(stored, tensor)

    def read_expert(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """Mixtures of experts are refused before."""
        raise BadFiles(f"expert {expert} of {name!r} cannot be read from a GGUF file")

    def leftovers(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(self._tensors) - {self._stored_name(name) for name in names}

    def _stored_name(self, name: str) -> str | None:
        module, dot, kind = name.rpartition(".")
        found = self._names.get_name(module)
        stored = None if found is None else f"{found}{dot}{kind}"
        return stored if stored in self._tensors else None

    def _restore_layout(self, stored: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undoes what the conversion to GGUF did to the tensor's layout."""
        if self._config["model_type"] == "gpt2" and stored.endswith(_GPT2_TRANSPOSED):
            return tensor.T
        if self._config["model_type"] == "llama":
            heads = self._config["num_attention_heads"]
            if ".attn_q." in stored:
                return _unpermute(tensor, heads)
            if ".attn_k." in stored:
                return _unpermute(tensor, self._config.get("num_key_value_heads", heads))
        return tensor


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves of each head that a llama's rotary embedding pairs; puts them apart again."""
    half = tensor.shape[0] // heads // 2
    return tensor.view(heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _dequantize(tensor: gguf.ReaderTensor, dtype: torch.dtype) -> torch.Tensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    result = torch.empty(shape, dtype=dtype)
    if len(shape) < 2:
        return result.copy_(_values(tensor.data, tensor.tensor_type))
    rows = max(1, _BLOCK_VALUES // max(1, result[0].numel()))
    for start in range(0, shape[0], rows):
        result[start : start + rows] = _values(tensor.data[start : start + rows], tensor.tensor_type)
    return result


def _values(data: npt.NDArray[np.generic], kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    values = gguf.dequantize(data, kind)
    # Unquantized values come back as a view of the file, which torch does not take read-only.
    return torch.from_numpy(np.array(values) if not values.flags.writeable else values)
