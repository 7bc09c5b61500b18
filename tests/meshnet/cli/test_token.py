"""`meshnet token`: a file is made once, and each step of a rotation leaves what the next one needs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshnet.cli.main import app
from meshnet.security.token_file import MAX_TOKENS, read_tokens


def run(*arguments: str, code: int = 0) -> str:
    outcome = CliRunner().invoke(app, ["token", *arguments], env={"COLUMNS": "200"})
    assert outcome.exit_code == code, outcome.output
    return outcome.output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    run(str(tmp_path / "mesh token"))
    return tmp_path / "mesh token"


def test_a_file_is_made_for_its_owner_alone_and_its_token_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "mesh token"
    said = run(str(file))
    (token,) = read_tokens(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in said
    assert f"--token-file '{file}'" in said


def test_one_that_is_there_is_kept(file: Path) -> None:
    tokens = read_tokens(file)
    assert "there already, with 1 token." in run(str(file))
    assert read_tokens(file) == tokens


def test_the_steps_of_a_rotation(file: Path) -> None:
    (old,) = read_tokens(file)
    said = run(str(file), "--add")
    kept, new = read_tokens(file)
    assert kept == old != new
    said += run(str(file), "--rotate")
    assert read_tokens(file) == (new, old)
    said += run(str(file), "--drop-old")
    assert read_tokens(file) == (new,)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert old not in said
    assert new not in said
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_steps_that_make_no_sense(file: Path) -> None:
    (token,) = read_tokens(file)
    assert "--add first" in run(str(file), "--rotate", code=1)
    assert "one at a time" in run(str(file), "--add", "--rotate", code=2)
    for _ in range(MAX_TOKENS - 1):
        run(str(file), "--add")
    assert "--drop-old first" in run(str(file), "--add", code=1)
    assert read_tokens(file)[0] == token
    run(str(file), "--drop-old")
    assert "0 dropped" in run(str(file), "--drop-old")


@pytest.mark.parametrize("step", ["--add", "--rotate", "--drop-old"])
def test_files_that_are_not_in_order_get_one_clear_line(tmp_path: Path, step: str) -> None:
    file = tmp_path / "token"
    assert "makes one" in run(str(file), step, code=1)
    run(str(file))
    file.chmod(0o644)
    assert "chmod 600" in run(str(file), step, code=1)
    assert "chmod 600" in run(str(file), code=1)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot write" in run(str(tmp_path / "nowhere" / "token"), code=1)
