"""What tells the weights of two models of one architecture apart, without reading all of them. Without torch.

A checkpoint may have hundreds of gigabytes and is described at every start of a node. So a few blocks at fixed places
of each tensor are read. The usual ways of making another model (training, merging, converting, rounding otherwise)
change values all over the matrices that they touch. Models that differ only in values between the blocks look alike:
this finds mistakes, it does not prove that weights are equal, and does not stop somebody who means harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path

from meshnet.errors import BadFiles
from services.node.files.safetensors_header import TensorHeader

# A page, which is what disks and file systems read at least.
BLOCK_BYTES = 4096
NUM_BLOCKS = 3
# Norms and biases, even of 16,384 values in float32, are read whole.
WHOLE_BYTES = 65536


def blocks(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length, in bytes, of what is read of a tensor: all of a small one, else blocks spread evenly from
    its first byte to its last."""
    if num_bytes <= WHOLE_BYTES:
        # Of an empty one nothing: where it lies may be nonsense.
        if num_bytes:
            yield 0, num_bytes
        return
    for index in range(NUM_BLOCKS):
        yield (num_bytes - BLOCK_BYTES) * index // (NUM_BLOCKS - 1), BLOCK_BYTES


def sample_digests(folder: Path, tensors: Mapping[str, TensorHeader]) -> dict[str, str]:
    """A SHA-256 of the sampled bytes of each tensor, by name; the tensors' files lie in `folder`.

    It depends on a tensor's bytes alone, not on its file or place in it. Raises BadFiles, which names the file, if one
    cannot be read or ends too early.
    """
    files: dict[str, list[str]] = {}
    # In the order on the disk: a spinning one hardly seeks, and others read ahead.
    for name in sorted(tensors, key=lambda name: tensors[name].begin):
        files.setdefault(tensors[name].file, []).append(name)
    digests: dict[str, str] = {}
    for file, names in files.items():
        try:
            # Unbuffered, because a buffer reads more than it is asked for.
            with (folder / file).open("rb", buffering=0) as opened:
                digests |= {name: sample_digest(opened, name, tensors[name]) for name in names}
        except OSError as error:
            raise BadFiles(f"{file} cannot be read: {error.strerror}") from error
    return digests


def sample_digest(opened: FileIO, name: str, tensor: TensorHeader) -> str:
    """A SHA-256 of the sampled bytes of a tensor of an opened file. Raises BadFiles if it ends too early."""
    return digest_of(_parts(opened, name, tensor))


def digest_of(parts: Iterable[bytes]) -> str:
    """A SHA-256 of the sampled bytes of a tensor, in their order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _parts(opened: FileIO, name: str, tensor: TensorHeader) -> Iterator[bytes]:
    for offset, length in blocks(tensor.num_bytes):
        opened.seek(tensor.begin + offset)
        while length:
            # A read may give less than it is asked for, but nothing only at the end.
            part = opened.read(length)
            if not part:
                raise BadFiles(f"{tensor.file} ends within tensor {name!r}: it is cut short")
            yield part
            length -= len(part)
