"""The file of measured speeds: found again by the same node only, never a reason to fail."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from meshnet.model import Quantization
from meshnet.topology import Speed
from services.node.speed_cache import FILE_NAME, SpeedCache, default_cache_dir
from tests import models

MANIFEST = models.manifest()
SPEED = Speed("m", Quantization.INT8, 37123.4, 702.5)


def test_a_speed_is_found_again_by_the_next_process(tmp_path: Path) -> None:
    SpeedCache(tmp_path / "new" / "folder", "cpu").put(MANIFEST, SPEED)
    assert SpeedCache(tmp_path / "new" / "folder", "cpu").get(MANIFEST, Quantization.INT8) == SPEED
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [FILE_NAME]


def test_other_revisions_quantizations_and_machines_are_other_speeds(tmp_path: Path) -> None:
    SpeedCache(tmp_path, "cpu").put(MANIFEST, SPEED)
    cache = SpeedCache(tmp_path, "cpu")
    assert cache.get(MANIFEST, Quantization.NF4) is None
    assert cache.get(replace(MANIFEST, revision="r2"), Quantization.INT8) is None
    assert SpeedCache(tmp_path, "cuda:0").get(MANIFEST, Quantization.INT8) is None


def test_the_same_files_under_another_name_are_known(tmp_path: Path) -> None:
    SpeedCache(tmp_path, "cpu").put(MANIFEST, SPEED)
    other = SpeedCache(tmp_path, "cpu").get(replace(MANIFEST, model_id="other"), Quantization.INT8)
    assert other == replace(SPEED, model_id="other")


def test_what_others_wrote_is_kept(tmp_path: Path) -> None:
    one, other = SpeedCache(tmp_path, "one"), SpeedCache(tmp_path, "other")
    one.put(MANIFEST, SPEED)
    other.put(MANIFEST, replace(SPEED, decode_tokens_per_second=1.0))
    assert one.get(MANIFEST, Quantization.INT8) == SPEED


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b'{"format": 1, "spee',
        b"[]",
        b"[" * 100_000,
        json.dumps({"format": 2, "speeds": {}}).encode(),
        json.dumps({"format": 1, "speeds": {"k": {"prefill_tokens_per_second": 1.0}}}).encode(),
        b'{"format": 1, "speeds": {"k": {"prefill_tokens_per_second": NaN, "decode_tokens_per_second": 1}}}',
        b'{"format": 1, "speeds": {"k": {"prefill_tokens_per_second": 0, "decode_tokens_per_second": 1}}}',
    ],
)
def test_a_damaged_file_is_said_and_written_anew(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    cache = SpeedCache(tmp_path, "cpu")
    with caplog.at_level(logging.WARNING):
        assert cache.get(MANIFEST, Quantization.INT8) is None
    assert "measured again" in caplog.text
    cache.put(MANIFEST, SPEED)
    assert cache.get(MANIFEST, Quantization.INT8) == SPEED


def test_a_folder_that_cannot_be_written_is_said_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = SpeedCache(tmp_path / "file", "cpu")
    with caplog.at_level(logging.WARNING):
        cache.put(MANIFEST, SPEED)
    assert "cannot be kept" in caplog.text
    assert cache.get(MANIFEST, Quantization.INT8) is None


def test_without_a_folder_nothing_is_kept() -> None:
    cache = SpeedCache(None, "cpu")
    cache.put(MANIFEST, SPEED)
    assert cache.get(MANIFEST, Quantization.INT8) is None


def test_the_default_folder_follows_the_standard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "meshnet"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert default_cache_dir() == Path.home() / ".cache" / "meshnet"
