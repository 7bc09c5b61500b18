"""What is saved comes back; what is not ours is refused and left as it is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshnet.model import KvPrecision, LayerRange
from services.tracker.remembered import (
    MAX_EVICTED,
    Assignment,
    ForgetNode,
    Remembered,
    Save,
    SaveEvicted,
    SaveModel,
    SaveNode,
    SaveUndeployed,
)
from services.tracker.store import EVICTED, MemoryStore, SqliteStore, Store, StoreFailed, open_store
from tests.services.tracker.meshes import deployed

FIRST = Assignment("m", LayerRange(0, 10))
LAST = Assignment("m", LayerRange(20, 30))
# What version 1 wrote.
SCHEMA_1 = """
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
PRAGMA application_id = 0x6D657368;
PRAGMA user_version = 1;
PRAGMA journal_mode = WAL;
INSERT INTO node VALUES ('n1', 1);
INSERT INTO assignment VALUES ('n1', 'm', 0, 10);
INSERT INTO model VALUES ('gone', NULL);
INSERT INTO model VALUES ('m', '{"manifest": {"modelId": "m", "revision": "r1", "architecture": "llama",
"hiddenSize": 8, "vocabSize": 100, "contextLength": 1024, "layers": [{"bfloat16": "5", "int8": "5", "nf4": "5",
"float32": "5"}], "entry": {}, "kvBytesPerToken": "1"}, "kvTokens": "64", "priority": 3}');
"""


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = open_store(None if request.param == "memory" else tmp_path / "state.db")
    yield store
    store.close()


def test_a_new_store_remembers_nothing(store: Store) -> None:
    assert store.load() == Remembered()


def test_models_and_assignments_come_back(store: Store) -> None:
    model = deployed(kv_tokens=64, priority=-3)
    store.save([SaveModel(model), SaveNode("n1", (FIRST, LAST)), SaveNode("n2", (), draining=True)])
    assert store.load() == Remembered({"m": model}, frozenset(), {"n1": (FIRST, LAST), "n2": ()}, frozenset({"n2"}))
    store.save([SaveNode("n2", (LAST,))])
    assert store.load().draining == frozenset()


def test_the_limits_of_a_deployment_come_back(store: Store) -> None:
    model = replace(deployed(kv_tokens=64), max_context=256, replicas=2, kv_precision=KvPrecision.INT8)
    store.save([SaveModel(model)])
    assert store.load().models == {"m": model}


def test_the_newest_evictions_come_back_in_order(store: Store) -> None:
    store.save([SaveEvicted("n1", "i1"), SaveEvicted("n2", "i2"), SaveEvicted("n1", "i3"), SaveEvicted("n1", "i3")])
    assert list(store.load().evicted.items()) == [("n2", "i2"), ("n1", "i3")]
    store.save([SaveEvicted(f"o{i}", "i") for i in range(MAX_EVICTED - 1)])
    evicted = list(store.load().evicted)
    assert "n2" not in evicted
    assert evicted[0] == "n1"
    assert len(evicted) == MAX_EVICTED


def test_later_changes_replace_earlier_ones(store: Store) -> None:
    store.save([SaveModel(deployed(priority=1)), SaveNode("n1", (FIRST,)), SaveNode("n2", (LAST,))])
    store.save([SaveModel(deployed(priority=2)), SaveNode("n1", (LAST,)), ForgetNode("n2"), ForgetNode("n3")])
    assert store.load() == Remembered({"m": deployed(priority=2)}, frozenset(), {"n1": (LAST,)})


def test_an_undeploy_is_remembered_until_the_next_deploy(store: Store) -> None:
    store.save([SaveModel(deployed()), SaveUndeployed("m")])
    assert store.load() == Remembered(undeployed=frozenset({"m"}))
    store.save([SaveModel(deployed())])
    assert store.load() == Remembered({"m": deployed()})


def test_saving_twice_does_no_harm(store: Store) -> None:
    saves: list[Save] = [SaveModel(deployed()), SaveNode("n1", (FIRST,)), ForgetNode("n2")]
    store.save(saves)
    before = store.load()
    store.save(saves)
    assert store.load() == before


def test_a_file_outlives_the_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    store.save([SaveModel(deployed()), SaveNode("n1", (FIRST,))])
    before = store.load()
    store.close()
    again = SqliteStore(tmp_path / "state.db")
    assert again.load() == before != Remembered()
    again.close()


def test_one_tracker_a_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    store.save([SaveModel(deployed())])
    with pytest.raises(StoreFailed, match="another tracker uses it"):
        SqliteStore(tmp_path / "state.db")
    store.close()


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("milk, bread\n" * 100)
    with pytest.raises(StoreFailed, match=r"notes\.txt cannot be opened: file is not a database"):
        SqliteStore(path)
    assert path.read_text() == "milk, bread\n" * 100


def test_a_database_of_another_program_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "music.db"
    with sqlite3.connect(path) as foreign:
        foreign.execute("CREATE TABLE album (title TEXT)")
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(StoreFailed, match="database of another program"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = _edited(tmp_path, "PRAGMA user_version = 4")
    with pytest.raises(StoreFailed, match="state version 4, this meshnet knows 3"):
        SqliteStore(path)


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_a_version_before_is_brought_up_to_this_one(tmp_path: Path, version: int) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as old:
        old.executescript(SCHEMA_1 + (f"{EVICTED}; PRAGMA user_version = 2;" if version == 2 else ""))
    old.close()
    for _ in range(2):
        store = SqliteStore(path)
        before = store.load()
        model = before.models["m"]
        assert (model.kv_tokens, model.priority, model.max_context, model.replicas) == (64, 3, None, None)
        assert model.kv_precision is KvPrecision.BFLOAT16
        assert before.nodes == {"n1": (FIRST,)}
        assert before.draining == {"n1"}
        assert before.undeployed == {"gone"}
        store.save([SaveEvicted("n2", "i"), SaveModel(replace(model, max_context=None))])
        assert store.load() == replace(before, evicted={"n2": "i"})
        store.close()


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE model SET deployed = '{'",
        "UPDATE model SET deployed = '{}'",
        "UPDATE assignment SET end_layer = start_layer",
        "PRAGMA foreign_keys = OFF; DELETE FROM node",
    ],
)
def test_rows_without_sense_are_named_as_damage(tmp_path: Path, edit: str) -> None:
    store = SqliteStore(_edited(tmp_path, edit))
    with pytest.raises(StoreFailed, match=r"state\.db is damaged"):
        store.load()
    store.close()


def test_overwritten_pages_are_damage(tmp_path: Path) -> None:
    path = _edited(tmp_path, "PRAGMA journal_mode = DELETE")
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreFailed, match=r"state\.db"):
        SqliteStore(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match=r"nowhere/state\.db cannot be opened"):
        SqliteStore(tmp_path / "nowhere" / "state.db")


def test_without_a_path_nothing_is_written() -> None:
    assert isinstance(open_store(None), MemoryStore)


def _edited(folder: Path, script: str) -> Path:
    path = folder / "state.db"
    store = SqliteStore(path)
    store.save([SaveModel(deployed()), SaveNode("n1", (FIRST,))])
    store.close()
    editor = sqlite3.connect(path)
    editor.executescript(script)
    editor.close()
    return path
