"""Keeps measured speeds in a file, so that a node that is started again knows them at once."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

from meshnet.model import ModelManifest, Quantization
from meshnet.topology import Speed
from services.node.files.whole_file import write_whole

log = logging.getLogger(__name__)

FILE_NAME = "speeds.json"
FORMAT = 1
# The oldest are dropped: those of models and versions that are gone.
MAX_ENTRIES = 1000
RATES = ("prefill_tokens_per_second", "decode_tokens_per_second")

Entries = dict[str, dict[str, float]]


def default_cache_dir() -> Path:
    """Where the desktop standard puts caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "meshnet"


class SpeedCache:
    """`machine` is what speeds depend on beside the model. Without a folder nothing is kept.

    Errors are logged, never raised: what is not kept is measured again.
    """

    def __init__(self, folder: Path | None, machine: str) -> None:
        self._path = folder / FILE_NAME if folder else None
        self._machine = machine

    def get(self, manifest: ModelManifest, quantization: Quantization) -> Speed | None:
        entry = self._read().get(self._key(manifest, quantization))
        return Speed(manifest.model_id, quantization, *(entry[rate] for rate in RATES)) if entry else None

    def put(self, manifest: ModelManifest, speed: Speed) -> None:
        if not self._path:
            return
        entries = self._read()
        key = self._key(manifest, speed.quantization)
        entries.pop(key, None)
        entries[key] = {rate: getattr(speed, rate) for rate in RATES}
        newest = dict(list(entries.items())[-MAX_ENTRIES:])
        try:
            write_whole(self._path, json.dumps({"format": FORMAT, "speeds": newest}, indent=1))
        except OSError as error:
            log.warning("measured speeds cannot be kept in %s: %s", self._path, error)

    def _key(self, manifest: ModelManifest, quantization: Quantization) -> str:
        return f"{manifest.revision} {quantization} {self._machine}"

    def _read(self) -> Entries:
        if not self._path:
            return {}
        try:
            return _parse(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("the measured speeds in %s cannot be used and are measured again: %s", self._path, error)
            return {}


def _parse(text: bytes) -> Entries:
    """Raises ValueError for anything but what `put` writes."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    match content:
        case {"format": 1, "speeds": dict() as entries} if all(map(_is_entry, entries.values())):
            return entries
        case _:
            raise ValueError(f"it is not what format {FORMAT} is")


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and all(_is_rate(entry.get(rate)) for rate in RATES)


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
