"""Where a model's tensors come from, one at a time, under their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from meshnet.errors import BadFiles
from services.node.files.manifest import COMPUTED
from services.node.files.safetensors_header import TensorHeader

# Names that checkpoints store under another name than the module has in this version of transformers.
_STORED_AS = {"lm_head.weight": "embed_out.weight"}
# The same for a part of a name, as Mixtral's mixtures are called.
_PART_STORED_AS = {".mlp.": ".block_sparse_moe."}

# Of larger tensors rows of so many values are mapped at a time.
_PIECE_VALUES = 1 << 23

# One projection of one expert. transformers stacks those of all experts, gate above up.
_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(\w+)\.weight$")
_STACKS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


class WeightSource(Protocol):
    """Tensors under their Hugging Face names. Not thread-safe."""

    def holds(self, name: str) -> bool: ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU in memory of its own, in its Hugging Face layout. Raises BadFiles."""
        ...

    def read_expert(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The same of one expert, of a tensor that stacks those of all."""
        ...

    def leftovers(self, names: Collection[str]) -> frozenset[str]:
        """What is stored that none of these names stands for, under its stored name."""
        ...


class SafetensorsSource:
    """The safetensors files of a directory. Each read maps the file for as long as it takes to copy one tensor or a
    piece of it: what was read of a mapped file counts as the process's memory until it is unmapped.

    `tensors`: all of the model, by stored name. `present`: those of them that may be read, where the files have holes;
    None: all. `prefix` is what stands before the names of the base model; checkpoints of the base model alone lack it.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, TensorHeader],
        prefix: str,
        present: Collection[str] | None = None,
    ) -> None:
        self._directory = directory
        self._tensors = tensors
        self._present = tensors.keys() if present is None else present
        self._experts = _stacks_of_experts(self._tensors)
        self._prefix = f"{prefix}."

    def holds(self, name: str) -> bool:
        return self._stored_name(name) is not None or bool(self._expert_names(name))

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored_name(name)
        if stored is None:
            raise BadFiles(f"the weight files lack the tensor {name!r}")
        shape = self._tensors[stored].shape
        if self._tensors[stored].numel > _PIECE_VALUES and len(shape) > 1:
            return self._read_pieces(stored, shape, dtype)
        with self._reading(stored) as file:
            # A copy in any case: what was read is a view of the mapped file.
            tensor: torch.Tensor = file.get_tensor(stored).to(dtype, copy=True)
        return tensor

    def _read_pieces(self, stored: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        step = max(1, _PIECE_VALUES // tensor[0].numel())
        for begin in range(0, shape[0], step):
            with self._reading(stored) as file:
                tensor[begin : begin + step] = file.get_slice(stored)[begin : begin + step]
        return tensor

    def read_expert(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        stack = self._stored_name(name)
        if stack is not None:
            with self._reading(stack) as file:
                tensor: torch.Tensor = file.get_slice(stack)[expert].to(dtype, copy=True)
            return tensor
        parts = self._expert_names(name).get(expert)
        if not parts:
            raise BadFiles(f"the weight files lack expert {expert} of the tensor {name!r}")
        return torch.cat([self.read(part, dtype) for part in parts])

    def leftovers(self, names: Collection[str]) -> frozenset[str]:
        known = {self._stored_name(name) for name in names}
        known |= {part for name in names for parts in self._expert_names(name).values() for part in parts}
        return frozenset(name for name in self._tensors if name not in known and not COMPUTED.search(name))

    def _stored_name(self, name: str) -> str | None:
        return next((candidate for candidate in self._candidates(name) if candidate in self._tensors), None)

    def _candidates(self, name: str) -> Iterator[str]:
        """What a tensor may be stored as, the likeliest first."""
        for whole in (name, name.removeprefix(self._prefix), _STORED_AS.get(name)):
            if whole is not None:
                yield whole
                for part, stored in _PART_STORED_AS.items():
                    yield whole.replace(part, stored)

    def _expert_names(self, name: str) -> dict[int, tuple[str, ...]]:
        """What the tensors of single experts are stored as, by expert, of a tensor that stacks them."""
        stacks = (self._experts.get(candidate) for candidate in self._candidates(name))
        return next((stack for stack in stacks if stack), {})

    @contextmanager
    def _reading(self, stored: str) -> Iterator[Any]:
        """The file of a tensor, open and mapped until the end. Raises BadFiles if it cannot be read."""
        if stored not in self._present:
            raise BadFiles(f"tensor {stored!r} has not been fetched")
        file = self._tensors[stored].file
        try:
            with safe_open(str(self._directory / file), framework="pt", device="cpu") as opened:
                yield opened
        except (SafetensorError, OSError) as error:
            raise BadFiles(f"tensor {stored!r} cannot be read from {file}") from error


def _stacks_of_experts(stored: Collection[str]) -> dict[str, dict[int, tuple[str, ...]]]:
    """For each stack, under the name that it would be stored as, the tensors of each expert that has all of them."""
    stacks: dict[str, dict[int, tuple[str, ...]]] = {}
    for match in filter(None, map(_EXPERT.match, stored)):
        prefix, expert, projection = match[1], int(match[2]), match[3]
        for stack, kinds in _STACKS.items():
            for kind in kinds:
                parts = tuple(f"{prefix}.{expert}.{part}.weight" for part in kind)
                if kind[0] == projection and all(part in stored for part in parts):
                    stacks.setdefault(f"{prefix}.{stack}", {})[expert] = parts
    return stacks
