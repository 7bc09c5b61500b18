"""Where the tracker keeps what it must know again after a restart. Calls block: they belong on a thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from google.protobuf import json_format

from meshnet import convert
from meshnet.errors import InvalidRequest, MeshnetError
from meshnet.model import LayerRange
from meshnet.topology import DeployedModel
from meshnet.v1 import common_pb2
from services.tracker.remembered import (
    MAX_EVICTED,
    Assignment,
    Assignments,
    ForgetNode,
    Remembered,
    Save,
    SaveEvicted,
    SaveModel,
    SaveNode,
    SaveUndeployed,
)

# "mesh", as SQLite's application id: by it a file of another program is told apart.
APPLICATION_ID = 0x6D657368
SCHEMA_VERSION = 3
EVICTED = """
CREATE TABLE evicted (
    number INTEGER PRIMARY KEY,  -- grows: the oldest are forgotten
    node_id TEXT NOT NULL UNIQUE,
    incarnation TEXT NOT NULL
) STRICT;
"""
SCHEMA = f"""
BEGIN;
CREATE TABLE model (
    model_id TEXT PRIMARY KEY,
    deployed TEXT  -- meshnet.v1.DeployedModel as JSON; NULL: undeployed, and to stay so
) STRICT;
CREATE TABLE node (node_id TEXT PRIMARY KEY, draining INTEGER NOT NULL) STRICT;
CREATE TABLE assignment (
    node_id TEXT NOT NULL REFERENCES node ON DELETE CASCADE,
    model_id TEXT NOT NULL,
    start_layer INTEGER NOT NULL,
    end_layer INTEGER NOT NULL,
    PRIMARY KEY (node_id, model_id, start_layer)
) STRICT;
{EVICTED}
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
# By the version before: what makes the next one of it. Since 3 models may say how their KV caches are stored, which
# older software cannot read; where they do not, it is in bfloat16.
MIGRATIONS = {1: EVICTED, 2: ""}
LOCK_SECONDS = 1.0


class StoreFailed(MeshnetError):
    """The state cannot be read or written; says which file and why."""


class Store(Protocol):
    def load(self) -> Remembered:
        """What was saved. Raises StoreFailed if it makes no sense."""

    def save(self, saves: Sequence[Save]) -> None:
        """All changes in order, or none. A change that was saved before does no harm. Raises StoreFailed."""

    def close(self) -> None: ...


def open_store(path: Path | None) -> Store:
    """A file, made if it is not there; memory without a path. Raises StoreFailed."""
    return MemoryStore() if path is None else SqliteStore(path)


class MemoryStore:
    """Forgets everything with the process."""

    def __init__(self) -> None:
        self._models: dict[str, DeployedModel | None] = {}
        self._nodes: dict[str, SaveNode] = {}
        self._evicted: dict[str, str] = {}

    def load(self) -> Remembered:
        assignments = {node_id: node.assignments for node_id, node in self._nodes.items()}
        draining = (node_id for node_id, node in self._nodes.items() if node.draining)
        return _remembered(self._models, assignments, draining, self._evicted)

    def save(self, saves: Sequence[Save]) -> None:
        for save in saves:
            match save:
                case SaveModel(model):
                    self._models[model.model_id] = model
                case SaveUndeployed(model_id):
                    self._models[model_id] = None
                case SaveNode(node_id):
                    self._nodes[node_id] = save
                case ForgetNode(node_id):
                    self._nodes.pop(node_id, None)
                case SaveEvicted(node_id, incarnation):
                    self._evicted.pop(node_id, None)
                    self._evicted[node_id] = incarnation
                    if len(self._evicted) > MAX_EVICTED:
                        del self._evicted[next(iter(self._evicted))]

    def close(self) -> None:
        """Nothing to do."""


class SqliteStore:
    """One file, for one tracker at a time. May be used from any thread, by one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._explained("opened"):
            self._db = sqlite3.connect(path, timeout=LOCK_SECONDS, check_same_thread=False)
        try:
            with self._explained("opened"):
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def load(self) -> Remembered:
        try:
            with self._explained("read"):
                models = dict(self._models())
                rows = self._db.execute("SELECT node_id, model_id, start_layer, end_layer FROM assignment").fetchall()
                drained = dict(self._db.execute("SELECT node_id, draining FROM node").fetchall())
                evicted = dict(self._db.execute("SELECT node_id, incarnation FROM evicted ORDER BY number").fetchall())
            draining = (node_id for node_id in drained if drained[node_id])
            return _remembered(models, _by_node(drained, rows), draining, evicted)
        except (json_format.ParseError, InvalidRequest, KeyError, TypeError) as error:
            raise StoreFailed(f"{self._path} is damaged: {error}") from error

    def save(self, saves: Sequence[Save]) -> None:
        with self._explained("written"), self._db:
            for save in saves:
                self._save(save)

    def close(self) -> None:
        self._db.close()

    def _prepare(self) -> None:
        # One tracker a file: a second one would bring back what the first has undeployed.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        is_new = not tables and not application
        if not is_new and application != APPLICATION_ID:
            raise StoreFailed(f"{self._path} is a database of another program; name another file with --state")
        if not is_new and version not in (*MIGRATIONS, SCHEMA_VERSION):
            raise StoreFailed(
                f"{self._path} is of state version {version}, this meshnet knows {SCHEMA_VERSION}: "
                "run the meshnet that wrote it, or name another file with --state"
            )
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise StoreFailed(f"{self._path} is damaged: {verdict}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if is_new:
            self._db.executescript(SCHEMA)
        else:
            self._migrate(version)

    def _migrate(self, version: int) -> None:
        """Brings a file of an earlier version up to this one, one version a transaction."""
        for before in range(version, SCHEMA_VERSION):
            self._db.executescript(f"BEGIN; {MIGRATIONS[before]} PRAGMA user_version = {before + 1}; COMMIT;")

    def _models(self) -> Iterator[tuple[str, DeployedModel | None]]:
        for model_id, deployed in self._db.execute("SELECT model_id, deployed FROM model"):
            if deployed is None:
                yield model_id, None
            else:
                yield model_id, convert.model_from_proto(json_format.Parse(deployed, common_pb2.DeployedModel()))

    def _save(self, save: Save) -> None:
        match save:
            case SaveModel(model):
                text = json_format.MessageToJson(convert.model_to_proto(model), indent=None)
                self._db.execute("INSERT OR REPLACE INTO model VALUES (?, ?)", (model.model_id, text))
            case SaveUndeployed(model_id):
                self._db.execute("INSERT OR REPLACE INTO model VALUES (?, NULL)", (model_id,))
            case ForgetNode(node_id):
                self._db.execute("DELETE FROM node WHERE node_id = ?", (node_id,))
            case SaveNode(node_id, assignments, draining):
                text = "INSERT INTO node VALUES (?, ?) ON CONFLICT DO UPDATE SET draining = excluded.draining"
                self._db.execute(text, (node_id, int(draining)))
                self._db.execute("DELETE FROM assignment WHERE node_id = ?", (node_id,))
                rows = [(node_id, a.model_id, a.layers.start, a.layers.end) for a in assignments]
                self._db.executemany("INSERT OR REPLACE INTO assignment VALUES (?, ?, ?, ?)", rows)
            case SaveEvicted(node_id, incarnation):
                text = "INSERT OR REPLACE INTO evicted (node_id, incarnation) VALUES (?, ?)"
                self._db.execute(text, (node_id, incarnation))
                text = "DELETE FROM evicted WHERE number <= (SELECT max(number) FROM evicted) - ?"
                self._db.execute(text, (MAX_EVICTED,))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            why = "another tracker uses it" if "locked" in str(error) else str(error)
            raise StoreFailed(f"the state file {self._path} cannot be {what}: {why}") from error


def _remembered(
    models: Mapping[str, DeployedModel | None],
    nodes: Mapping[str, Assignments],
    draining: Iterable[str],
    evicted: Mapping[str, str],
) -> Remembered:
    return Remembered(
        models={model_id: model for model_id, model in models.items() if model is not None},
        undeployed=frozenset(model_id for model_id, model in models.items() if model is None),
        nodes=nodes,
        draining=frozenset(draining),
        evicted=dict(evicted),
    )


def _by_node(node_ids: Iterable[str], rows: Iterable[tuple[str, str, int, int]]) -> dict[str, Assignments]:
    """Raises KeyError for a row of another node, InvalidRequest for layers that are none."""
    nodes: dict[str, list[Assignment]] = {node_id: [] for node_id in node_ids}
    for node_id, model_id, start, end in rows:
        nodes[node_id].append(Assignment(model_id, LayerRange(start, end)))
    return {node_id: tuple(sorted(assignments)) for node_id, assignments in nodes.items()}
