"""Brings tensors here: exactly those asked for, checked, from whoever has them; goes on where it was interrupted."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as Collection
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from meshnet.errors import BadFiles, LoadFailed, NoSource
from meshnet.sizes import format_size
from services.node.core.runs import Extent, Run, plan_runs
from services.node.fetching.source import Source, SourceFailed, SourceWrong
from services.node.files.description import Description
from services.node.files.fetched import FetchedModel, fetched_folder
from services.node.files.support import check_supported

log = logging.getLogger(__name__)

# Written and remembered at once; what a process that dies loses at most.
PIECE_BYTES = 1 << 20
# Without a byte from anyone for so long the fetch is given up; until then the sources are asked again and again.
PATIENCE_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 5.0
# Left free on the disk for others.
DISK_MARGIN_BYTES = 256 << 20

# Called with (bytes that are here, bytes of the shard's tensors as they are stored); may raise to end the fetch.
Progress = Callable[[int, int], None]

_Result = TypeVar("_Result")


class Fetcher:
    """One fetch of some tensors of one model, for a thread of its own.

    `sources`: those that may have the model at this revision now, the best first; asked again whenever all have failed.
    `wait` pauses for so many seconds, and may raise to end the fetch.
    """

    def __init__(
        self,
        model_id: str,
        revision: str,
        sources: Callable[[], Sequence[Source]],
        wait: Callable[[float], None] = time.sleep,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._model_id = model_id
        self._revision = revision
        self._sources = sources
        self._wait = wait
        self._patience = patience
        self._wrong: set[str] = set()
        self.fetched_bytes = 0

    def open(self, root: Path) -> FetchedModel:
        """The folder of this revision, with a description that the revision vouches for. Raises NoSource if nobody
        gives one, LoadFailed if it cannot be served here, or the disk does not take it."""
        folder = fetched_folder(root, self._model_id, self._revision)
        try:
            model = FetchedModel.open(folder)
            if model.description.revision() == self._revision:
                return model
            log.warning("the description of %s here is damaged: it is fetched again", self._model_id)
        except BadFiles:
            pass
        description = self._from_any(self._description)
        check_supported(description.config)
        with _disk_errors(folder):
            return FetchedModel.create(folder, description)

    def fetch(self, model: FetchedModel, wanted: Collection[str], progress: Progress) -> None:
        """In the end all these tensors are there. Raises NoSource if nobody gives them, LoadFailed if the disk does
        not take them."""
        with _disk_errors(model.folder):
            with model.writing:
                model.claim()
                # What was fetched long ago may have been damaged since.
                model.discard(sorted(name for name in wanted & model.present if not model.is_sound(name)))
                missing = wanted - model.present
                groups = plan_runs(_extents(model, missing))
            tally = _Tally(model, wanted, missing, progress)
            tally.add(0)
            if groups:
                self._fetch_groups(model, groups, tally)

    def _fetch_groups(self, model: FetchedModel, groups: Sequence[Run], tally: _Tally) -> None:
        _check_disk(model.folder, tally.total - tally.here)
        missing, here = format_size(tally.total - tally.here), format_size(tally.here)
        log.info("fetching %s of weights of %s; %s are here already", missing, self._model_id, here)
        started = time.monotonic()
        for file in sorted({group.file for group in groups}):
            self._from_any(partial(_fetch_header, model, file))
        for group in groups:
            names = frozenset(extent.name for extent in group.extents)
            after = tally.here + group.end - group.begin
            self._from_any(partial(self._fetch_tensors, model, names, tally))
            # Another thread may have brought some of them.
            tally.add(after - tally.here)
        log.info("fetched %d bytes of weights in %.1f s", self.fetched_bytes, time.monotonic() - started)

    def _description(self, source: Source) -> Description:
        description = source.describe()
        if description.revision() != self._revision:
            raise SourceWrong("what it has is not of the revision that the mesh serves")
        return description

    def _fetch_tensors(self, model: FetchedModel, names: Collection[str], tally: _Tally, source: Source) -> None:
        """Tensors that lie side by side, or what is missing of them, and their check. Raises SourceFailed."""
        digests = source.digests(names)
        with model.writing:
            names = names - model.present
            for run in plan_runs(_extents(model, names)):
                if run.begin < run.end:
                    self._fetch_run(model, run, source, tally)
            bad = [n for n in sorted(names) if not model.is_sound(n) or (digests and model.digest(n) != digests[n])]
            model.add(name for name in names if name not in bad)
            model.discard(bad)
        if bad:
            tally.add(-sum(model.description.tensors[name].num_bytes for name in bad))
            raise SourceWrong(f"tensor {bad[0]!r} is not what it should be")

    def _fetch_run(self, model: FetchedModel, run: Run, source: Source, tally: _Tally) -> None:
        offset, piece = run.begin, bytearray()
        for chunk in source.stream(run.file, run.begin, run.end):
            piece += chunk
            if len(piece) >= PIECE_BYTES or offset + len(piece) == run.end:
                model.write(run.file, offset, memoryview(piece))
                self._note(model, run, offset, offset + len(piece))
                self.fetched_bytes += len(piece)
                tally.add(len(piece))
                offset, piece = offset + len(piece), bytearray()

    def _note(self, model: FetchedModel, run: Run, begin: int, end: int) -> None:
        """The run is there up to `end`, and was up to `begin`."""
        for extent in run.extents:
            if extent.begin < end and extent.end > begin:
                model.wrote(extent.name, min(end, extent.end) - model.description.tensors[extent.name].begin)

    def _from_any(self, get: Callable[[Source], _Result]) -> _Result:
        """From the first source that gives it, in rounds with pauses between them. Raises NoSource when nothing has
        come from anybody for too long."""
        deadline, pause = time.monotonic() + self._patience, FIRST_PAUSE_SECONDS
        failures: dict[str, str] = {}
        while True:
            for source in (source for source in self._sources() if source.name not in self._wrong):
                fetched = self.fetched_bytes
                try:
                    return get(source)
                except SourceFailed as error:
                    log.warning("fetching %s from %s: %s", self._model_id, source.name, error)
                    failures[source.name] = str(error)
                    if isinstance(error, SourceWrong):
                        self._wrong.add(source.name)
                if self.fetched_bytes > fetched:
                    deadline, pause = time.monotonic() + self._patience, FIRST_PAUSE_SECONDS
            if time.monotonic() + pause > deadline:
                raise NoSource(
                    f"no node gives the weights of {self._model_id!r} at revision "
                    f"{self._revision[:12]}: {_listed(failures) or 'none has them'}"
                )
            self._wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class _Tally:
    """How much of the shard is here, for `progress`."""

    def __init__(
        self, model: FetchedModel, wanted: Collection[str], missing: Collection[str], progress: Progress
    ) -> None:
        tensors = model.description.tensors
        self.total = sum(tensors[name].num_bytes for name in wanted)
        self.here = self.total - sum(tensors[name].num_bytes - model.partial.get(name, 0) for name in missing)
        self._progress = progress

    def add(self, num_bytes: int) -> None:
        self.here += num_bytes
        self._progress(self.here, self.total)


def _listed(failures: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in failures.items())


def _extents(model: FetchedModel, names: Iterable[str]) -> Iterable[Extent]:
    for name in names:
        tensor = model.description.tensors[name]
        begin = tensor.begin + model.partial.get(name, 0)
        yield Extent(name, tensor.file, begin, tensor.begin + tensor.num_bytes)


def _fetch_header(model: FetchedModel, file: str, source: Source) -> None:
    """What stands before a file's tensors: read anew at each fetch, it is small. Raises SourceFailed."""
    header = b"".join(source.stream(file, 0, model.description.header_bytes(file)))
    try:
        with model.writing:
            model.write(file, 0, header)
            model.check_header(file)
    except BadFiles as error:
        raise SourceWrong(str(error)) from error


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """What the disk refuses is not the fault of a source. Raises BadFiles."""
    try:
        yield
    except OSError as error:
        raise BadFiles(f"weights cannot be kept in {folder}: {error.strerror or error}") from error


def _check_disk(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes + DISK_MARGIN_BYTES > free:
        raise LoadFailed(
            f"{format_size(num_bytes)} of weights are to be fetched, "
            f"and the disk of --cache-dir has {format_size(free)} free"
        )
