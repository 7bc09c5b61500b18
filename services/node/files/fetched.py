"""A folder that holds as much of a model as was fetched from elsewhere. Without torch.

Its files are those of the model, at their full sizes, with holes where nothing was fetched: they take no more of the
disk than what is in them. A journal beside them says what is there, and survives the death of the process at any
moment: a tensor counts only once all of it has been checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Self

from meshnet.errors import BadFiles, LoadFailed
from meshnet.model import check_model_id
from meshnet.model_files import CONFIG_FILE, ModelFiles
from services.node.files.description import Description, description_from_json, description_to_json
from services.node.files.gguf_config import gguf_config
from services.node.files.gguf_header import gguf_tensors, open_gguf
from services.node.files.gguf_rotary import stated_factors
from services.node.files.safetensors_header import read_header
from services.node.files.weight_samples import sample_digest
from services.node.files.whole_file import write_whole

DESCRIPTION_FILE = "description.json"
JOURNAL_FILE = "journal"
LOCK_FILE = "lock"
_READ_BYTES = 1 << 20
_WHOLE = "whole"
_NOTHING = "nothing"


def fetched_folder(root: Path, model_id: str, revision: str) -> Path:
    """Where a node keeps what it fetches of one revision of a model."""
    if not revision.isalnum():
        raise BadFiles(f"{revision!r} is not a revision")
    return root / check_model_id(model_id) / revision


class FetchedModel:
    """`description` is what the mesh's revision was computed of, so names, shapes and samples can be relied on.

    `present`: stored names of the tensors that are there, checked. `partial`: how many of its first bytes are there of
    a tensor that is not. Whoever writes holds `writing`, and has called `claim` first.
    """

    def __init__(self, folder: Path, description: Description) -> None:
        self.folder = folder
        self.description = description
        self.present: set[str] = set()
        self.partial: dict[str, int] = {}
        self.writing = threading.RLock()
        self._journal: IO[str] | None = None
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, folder: Path, description: Description) -> Self:
        """Begins an empty one, or goes on with what is there. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG_FILE, json.dumps(description.config))
        write_whole(folder / DESCRIPTION_FILE, description_to_json(description))
        return cls._read(folder, description)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raises BadFiles if nothing was begun there."""
        try:
            description = description_from_json((folder / DESCRIPTION_FILE).read_bytes())
        except OSError as error:
            raise BadFiles(f"nothing has been fetched to {folder.name}: {error.strerror}") from error
        return cls._read(folder, description)

    @classmethod
    def _read(cls, folder: Path, description: Description) -> Self:
        model = cls(folder, description)
        with contextlib.suppress(FileNotFoundError), (folder / JOURNAL_FILE).open(encoding="utf-8") as journal:
            for line in journal:
                # The last line may have been cut short.
                with contextlib.suppress(ValueError, TypeError):
                    model._note(*json.loads(line))
        return model

    def files(self, model_id: str) -> ModelFiles:
        gguf = [self.folder / file for file in self.description.sizes if self.description.is_gguf]
        return ModelFiles(model_id, gguf[0] if gguf else self.folder)

    def claim(self) -> None:
        """From now on this process alone writes here. Raises LoadFailed if another does, OSError."""
        if self._journal:
            return
        lock = (self.folder / LOCK_FILE).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise LoadFailed("another process fetches to the same folder: give each node its own --cache-dir") from None
        self._lock = lock
        self._journal = (self.folder / JOURNAL_FILE).open("a", encoding="utf-8")
        # Ends what a dead process may have left of a line.
        self._journal.write("\n")

    def close(self) -> None:
        """Others may write here."""
        for file in filter(None, (self._journal, self._lock)):
            file.close()
        self._journal = self._lock = None

    def write(self, file: str, offset: int, data: bytes | memoryview) -> None:
        """Raises OSError."""
        with self._opened(file) as descriptor:
            while data:
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written

    def wrote(self, name: str, num_bytes: int) -> None:
        """So many of the first bytes of a tensor are there now."""
        self._say(name, num_bytes)

    def add(self, names: Iterable[str]) -> None:
        """These tensors are there and have been checked."""
        for name in names:
            self._say(name, _WHOLE)

    def discard(self, names: Iterable[str]) -> None:
        """What is there of these tensors is of no use."""
        for name in names:
            self._say(name, _NOTHING)

    def is_sound(self, name: str) -> bool:
        """Whether the sampled bytes of a tensor are those of the description."""
        tensor = self.description.tensors[name]
        try:
            with (self.folder / tensor.file).open("rb", buffering=0) as opened:
                return sample_digest(opened, name, tensor) == self.description.digests[name]
        except (OSError, BadFiles):
            return False

    def digest(self, name: str) -> str:
        """SHA-256 of all bytes of a tensor as they are on the disk. Raises OSError."""
        tensor = self.description.tensors[name]
        return file_digest(self.folder / tensor.file, tensor.begin, tensor.num_bytes)

    def check_header(self, file: str) -> None:
        """Raises BadFiles if what stands before a file's tensors is not what the description says."""
        stated = {name: tensor for name, tensor in self.description.tensors.items() if tensor.file == file}
        if self.description.is_gguf:
            reader = open_gguf(self.files("fetched"))
            config = self.description.config
            is_right = gguf_tensors(reader) == stated and gguf_config(reader, stated_factors(config)) == config
        else:
            held = read_header(self.folder / file)
            is_right = all(held.get(name) == tensor for name, tensor in stated.items())
        if not is_right:
            raise BadFiles(f"the header of {file} is not that of the model's revision")

    @contextlib.contextmanager
    def _opened(self, file: str) -> Iterator[int]:
        descriptor = os.open(self.folder / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(descriptor).st_size != self.description.sizes[file]:
                os.ftruncate(descriptor, self.description.sizes[file])
            yield descriptor
        finally:
            os.close(descriptor)

    def _say(self, name: str, what: int | str) -> None:
        self._note(name, what)
        assert self._journal is not None
        self._journal.write(json.dumps([name, what]) + "\n")
        # Not to the disk itself: what a power cut loses of the weights is found by their check.
        self._journal.flush()

    def _note(self, name: str, what: int | str) -> None:
        """Raises ValueError for what a journal does not say."""
        if name not in self.description.tensors:
            raise ValueError(name)
        self.partial.pop(name, None)
        self.present.discard(name)
        if what == _WHOLE:
            self.present.add(name)
        elif what != _NOTHING:
            self.partial[name] = min(int(what), self.description.tensors[name].num_bytes)


def file_digest(path: Path, begin: int, num_bytes: int) -> str:
    """SHA-256 of a part of a file. Raises OSError, and BadFiles if the file ends before."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while num_bytes:
            part = file.read(min(num_bytes, _READ_BYTES))
            if not part:
                raise BadFiles(f"{path.name} is cut short")
            digest.update(part)
            num_bytes -= len(part)
    return digest.hexdigest()
