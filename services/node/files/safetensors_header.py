"""The headers of safetensors files: which tensors a model directory holds, and what they weigh.

Read here, without torch and without touching tensor data, so that a node can plan before it loads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshnet.errors import BadFiles

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000

_LENGTH_BYTES = 8
# Sizes of whole-byte types; a file with others is refused.
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One stored tensor. `shape` is as stored, row-major; `file` is the name of the file that holds it, from byte
    `begin` on."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    num_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_directory(directory: Path) -> dict[str, TensorHeader]:
    """All tensors of a model directory, by name. Raises BadFiles if a file is missing or broken."""
    if (directory / INDEX_FILE).is_file():
        return _read_indexed(directory)
    if (directory / SINGLE_FILE).is_file():
        return read_header(directory / SINGLE_FILE)
    raise BadFiles(f"there is neither a {SINGLE_FILE} nor a {INDEX_FILE} in the model's directory")


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file. Raises BadFiles if the header does not describe the file."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = header_length(path.name, file.read(_LENGTH_BYTES), file_bytes)
            return parse_header(path.name, file.read(length), file_bytes)
    except OSError as error:
        raise BadFiles(f"{path.name} cannot be read: {error.strerror}") from error


def header_length(file: str, first: bytes, file_bytes: int) -> int:
    """Bytes of the header behind the first eight of a file. Raises BadFiles."""
    length = int.from_bytes(first, "little")
    if file_bytes < _LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
        raise BadFiles(f"{file} is not a safetensors file, or is cut short: its header does not fit in it")
    return length


def parse_header(file: str, text: bytes, file_bytes: int) -> dict[str, TensorHeader]:
    """The tensors of a file with this header. Raises BadFiles if it does not describe a file of so many bytes."""
    data_begin = _LENGTH_BYTES + len(text)
    return {
        name: _parse_entry(file, name, entry, data_begin, file_bytes - data_begin)
        for name, entry in parse_object(file, text).items()
        if name != "__metadata__"
    }


def indexed_tensors(
    index: Mapping[str, Any], read: Callable[[str], Mapping[str, TensorHeader]]
) -> dict[str, TensorHeader]:
    """The tensors that an index names; `read` gives those of one file. Raises BadFiles."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadFiles(f"{INDEX_FILE} has no weight_map")
    tensors: dict[str, TensorHeader] = {}
    for file in sorted({str(file) for file in weight_map.values()}):
        if Path(file).name != file:
            raise BadFiles(f"{INDEX_FILE} names {file!r}, which is not a file beside it")
        tensors |= read(file)
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise BadFiles(f"{INDEX_FILE} names tensors that no file holds: {', '.join(missing[:3])}")
    return {name: tensors[name] for name in weight_map}


def parse_object(file: str, text: bytes) -> dict[str, Any]:
    """Raises BadFiles if the text is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFiles(f"{file} does not hold valid JSON where it should") from error
    if not isinstance(value, dict):
        raise BadFiles(f"{file} holds JSON that is not an object where one should be")
    return value


def _read_indexed(directory: Path) -> dict[str, TensorHeader]:
    try:
        index = parse_object(INDEX_FILE, (directory / INDEX_FILE).read_bytes())
    except OSError as error:
        raise BadFiles(f"{INDEX_FILE} cannot be read: {error.strerror}") from error
    return indexed_tensors(index, lambda file: read_header(directory / file))


def _parse_entry(file: str, name: str, entry: object, data_begin: int, data_bytes: int) -> TensorHeader:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise BadFiles(f"{file}: tensor {name!r} is not described by dtype, shape and data_offsets")
    if dtype not in _DTYPE_BYTES:
        raise BadFiles(f"{file}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise BadFiles(f"{file}: tensor {name!r} has the impossible shape {shape!r}")
    header = TensorHeader(dtype, tuple(shape), file, data_begin + begin, end - begin)
    if not 0 <= begin <= end <= data_bytes:
        raise BadFiles(f"{file}: tensor {name!r} lies outside the file, which is probably cut short")
    if header.num_bytes != header.numel * _DTYPE_BYTES[dtype]:
        raise BadFiles(f"{file}: tensor {name!r} has {header.num_bytes} bytes, which do not fit its shape and dtype")
    return header
