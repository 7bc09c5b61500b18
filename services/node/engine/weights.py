"""Where a model's tensors come from, one at a time, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from meshnet.errors import BadFiles
from meshnet.model_files import ModelFiles
from services.node.files.manifest import COMPUTED
from services.node.files.safetensors_header import read_directory

# Names that checkpoints store under another name than the module has in this version of transformers.
_STORED_AS = {"lm_head.weight": "embed_out.weight"}


class WeightSource(Protocol):
    """Tensors under their Hugging Face names. Not thread-safe."""

    def holds(self, name: str) -> bool: ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU in memory of its own, in its Hugging Face layout. Raises BadFiles."""
        ...

    def leftovers(self, names: Collection[str]) -> frozenset[str]:
        """What is stored that none of these names stands for, under its stored name."""
        ...


class SafetensorsSource:
    """The safetensors files of a directory. Each read maps the file for as long as it takes to copy the one tensor:
    what was read of a mapped file counts as the process's memory until it is unmapped.

    `prefix` is what stands before the names of the base model; checkpoints of the base model alone lack it.
    """

    def __init__(self, files: ModelFiles, prefix: str) -> None:
        self._directory = files.path
        self._tensors = read_directory(files.path)
        self._prefix = f"{prefix}."

    def holds(self, name: str) -> bool:
        return self._stored_name(name) is not None

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored_name(name)
        if stored is None:
            raise BadFiles(f"the weight files lack the tensor {name!r}")
        file = self._tensors[stored].file
        try:
            with safe_open(str(self._directory / file), framework="pt", device="cpu") as opened:
                tensor: torch.Tensor = opened.get_tensor(stored)
                # A copy in any case: what was read is a view of the mapped file.
                return tensor.to(dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise BadFiles(f"tensor {stored!r} cannot be read from {file}") from error

    def leftovers(self, names: Collection[str]) -> frozenset[str]:
        known = {self._stored_name(name) for name in names}
        return frozenset(name for name in self._tensors if name not in known and not COMPUTED.search(name))

    def _stored_name(self, name: str) -> str | None:
        candidates = (name, name.removeprefix(self._prefix), _STORED_AS.get(name))
        return next((candidate for candidate in candidates if candidate in self._tensors), None)
