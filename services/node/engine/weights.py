"""Where a model's tensors come from, one at a time, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

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
    """The safetensors files of a directory. Reads map the file and copy the one tensor.

    `prefix` is what stands before the names of the base model; checkpoints of the base model alone lack it.
    """

    def __init__(self, files: ModelFiles, prefix: str) -> None:
        self._directory = files.path
        self._tensors = read_directory(files.path)
        self._prefix = f"{prefix}."
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open.close()

    def holds(self, name: str) -> bool:
        return self._stored_name(name) is not None

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored_name(name)
        if stored is None:
            raise BadFiles(f"the weight files lack the tensor {name!r}")
        try:
            tensor: torch.Tensor = self._file(self._tensors[stored].file).get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise BadFiles(f"tensor {stored!r} cannot be read from {self._tensors[stored].file}") from error
        # A copy in any case: what was read is a view of the mapped file.
        return tensor.to(dtype, copy=True)

    def leftovers(self, names: Collection[str]) -> frozenset[str]:
        known = {self._stored_name(name) for name in names}
        return frozenset(name for name in self._tensors if name not in known and not COMPUTED.search(name))

    def _stored_name(self, name: str) -> str | None:
        candidates = (name, name.removeprefix(self._prefix), _STORED_AS.get(name))
        return next((candidate for candidate in candidates if candidate in self._tensors), None)

    def _file(self, file: str) -> Any:
        if file not in self._files:
            opened = safe_open(str(self._directory / file), framework="pt", device="cpu")
            self._files[file] = self._open.enter_context(opened)
        return self._files[file]
