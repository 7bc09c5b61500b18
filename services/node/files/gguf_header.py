"""The headers of GGUF files: what they say of the model, and its tensors. Without torch."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from meshnet.errors import BadFiles, LoadFailed
from meshnet.model_files import ModelFiles
from services.node.files.safetensors_header import TensorHeader

# How the library names little-endian files on little-endian machines.
_NATIVE_ORDER = "I"
# Longer ones are per token, never per layer.
_LONG_ARRAY = 4096


class HeaderReader(GGUFReader):  # type: ignore[misc]  # the library is untyped
    """Leaves out long arrays. They are vocabulary and merges, which only a tokenizer needs: of 49,000 tokens the
    library makes 165 MB of objects in over two seconds."""

    def __init__(self, path: Path) -> None:
        self.file_name = path.name
        super().__init__(path)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if GGUFValueType(raw_type) is not GGUFValueType.ARRAY or self.byte_order != _NATIVE_ORDER:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, count = struct.unpack_from("<IQ", self.data, orig_offs)
        if count <= _LONG_ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        begin = orig_offs + struct.calcsize("<IQ")
        return self._end_of_array(begin, GGUFValueType(item_type), count) - orig_offs, [], [], [GGUFValueType.ARRAY]

    def _end_of_array(self, offset: int, item_type: GGUFValueType, count: int) -> int:
        if item_type is not GGUFValueType.STRING:
            return offset + count * int(np.dtype(self.gguf_scalar_to_np[item_type]).itemsize)
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", self.data, offset)
            offset += struct.calcsize("<Q") + int(length)
        return offset


def open_gguf(files: ModelFiles) -> HeaderReader:
    """Maps the file and reads its header. Raises LoadFailed if it is no whole GGUF file."""
    try:
        reader = HeaderReader(files.path)
        num_parts = header_value(reader, "split.count")
    except OSError as error:
        raise BadFiles(f"{files.path.name} of model {files.model_id!r} cannot be read: {error.strerror}") from error
    # The reader trusts the file, so that a broken one fails wherever its lengths lead.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error) as error:
        raise BadFiles(f"{files.path.name} of model {files.model_id!r} is broken or cut short: {error}") from error
    if isinstance(num_parts, int) and num_parts > 1:
        raise LoadFailed(
            f"model {files.model_id!r} is split into {num_parts} GGUF files, which is not supported; "
            "make one file of them with llama-gguf-split --merge"
        )
    return reader


def gguf_tensors(reader: HeaderReader) -> dict[str, TensorHeader]:
    """All tensors by their GGUF names, in row-major shapes of values (not of blocks)."""
    return {
        tensor.name: TensorHeader(
            dtype=tensor.tensor_type.name,
            shape=tuple(int(size) for size in reversed(tensor.shape)),
            file=reader.file_name,
            begin=int(tensor.data_offset),
            num_bytes=int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    }


def header_value(reader: HeaderReader, key: str) -> Any:
    """What the file states under a key; None: nothing. Raises BadFiles for what no config holds."""
    field = reader.get_field(key)
    try:
        return None if field is None else field.contents()
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise BadFiles(f"the GGUF file states under {key!r} what cannot be read: {error}") from error
