"""All that a model's files say of it beside the values: its config, its tensors, and a sample of each. Without torch.

It makes the model's manifest and revision, and it is what a node that lacks the files is given of them first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshnet.errors import BadFiles
from meshnet.model_files import GGUF_SUFFIX, ModelFiles
from services.node.files.gguf_config import gguf_config
from services.node.files.gguf_header import gguf_tensors, open_gguf
from services.node.files.model_config import Config, read_config
from services.node.files.safetensors_header import TensorHeader, read_directory
from services.node.files.support import check_supported
from services.node.files.weight_samples import sample_digests

MAX_FILE_BYTES = 1 << 50
MAX_DIMENSIONS = 8
# These say where a config was written, not what it means.
_VOLATILE_KEYS = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class Description:
    """`sizes`: bytes of each file that holds tensors. `digests`: of the sampled bytes of each tensor (see
    weight_samples). Tensors have their stored names."""

    config: Config
    sizes: Mapping[str, int]
    tensors: Mapping[str, TensorHeader]
    digests: Mapping[str, str]

    @property
    def is_gguf(self) -> bool:
        return any(name.endswith(GGUF_SUFFIX) for name in self.sizes)

    def revision(self) -> str:
        """Equal on all nodes that hold the same config and the same tensors, whatever files these lie in.

        Of large tensors a few blocks count, so models that differ only between these have the same one (see ADR 7).
        GGUF and safetensors files of one model are different weights, and have different ones.
        """
        stated = {key: value for key, value in self.config.items() if key not in _VOLATILE_KEYS}
        described = sorted(
            (name, tensor.shape, tensor.dtype, self.digests[name]) for name, tensor in self.tensors.items()
        )
        return hashlib.sha256(json.dumps([stated, described], sort_keys=True).encode()).hexdigest()

    def header_bytes(self, file: str) -> int:
        """What stands in a file before its first tensor."""
        begins = [tensor.begin for tensor in self.tensors.values() if tensor.file == file and tensor.num_bytes]
        return min(begins, default=self.sizes[file])


def describe(files: ModelFiles) -> Description:
    """Reads the headers, and a sample of the weights. Raises LoadFailed, with the reason, if it cannot be served."""
    if files.is_gguf:
        reader = open_gguf(files)
        config = gguf_config(reader)
        check_supported(config)
        tensors, folder = gguf_tensors(reader), files.path.parent
    else:
        config, tensors, folder = read_config(files), read_directory(files.path), files.path
    return Description(config, _sizes(folder, tensors), tensors, sample_digests(folder, tensors))


def _sizes(folder: Path, tensors: Mapping[str, TensorHeader]) -> dict[str, int]:
    sizes = {}
    for file in sorted({tensor.file for tensor in tensors.values()}):
        try:
            sizes[file] = (folder / file).stat().st_size
        except OSError as error:
            raise BadFiles(f"{file} cannot be read: {error.strerror}") from error
    return sizes


def description_to_json(description: Description) -> str:
    rows = [
        [name, t.dtype, list(t.shape), t.file, t.begin, t.num_bytes, description.digests[name]]
        for name, t in description.tensors.items()
    ]
    return json.dumps({"config": description.config, "sizes": description.sizes, "tensors": rows})


def description_from_json(text: str | bytes) -> Description:
    """From what another wrote, of whom nothing is believed: see also `revision`. Raises BadFiles."""
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFiles("the description of the model is not valid JSON") from error
    match stated:
        case {"config": dict(config), "sizes": dict(sizes), "tensors": list(rows)}:
            pass
        case _:
            raise BadFiles("the description of the model lacks its config, sizes or tensors")
    for file, size in sizes.items():
        if not is_plain_name(file) or type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
            raise BadFiles(f"the description of the model names a file {file!r} of {size!r} bytes")
    tensors, digests = {}, {}
    for row in rows:
        name, tensor, digest = _tensor(row, sizes)
        tensors[name], digests[name] = tensor, digest
    return Description(config, sizes, tensors, digests)


def is_plain_name(file: object) -> bool:
    """Whether it names a weight file in the model's own folder, and nothing else."""
    return (
        isinstance(file, str)
        and file.endswith((GGUF_SUFFIX, ".safetensors"))
        and not file.startswith(".")
        and not {"/", "\\", "\0"} & set(file)
    )


def _tensor(row: object, sizes: Mapping[str, int]) -> tuple[str, TensorHeader, str]:
    match row:
        case [str(name), str(dtype), list(shape), str(file), int(begin), int(num_bytes), str(digest)]:
            pass
        case _:
            raise BadFiles("the description of the model has a tensor that is none")
    natural: Any = [size for size in shape if type(size) is int and 0 <= size <= MAX_FILE_BYTES]
    if len(natural) != len(shape) or len(shape) > MAX_DIMENSIONS:
        raise BadFiles(f"tensor {name!r} has the impossible shape {shape!r}")
    if file not in sizes or begin < 0 or num_bytes < 0 or begin + num_bytes > sizes[file]:
        raise BadFiles(f"tensor {name!r} lies outside the files of the model")
    return name, TensorHeader(dtype, tuple(shape), file, begin, num_bytes), digest
