"""Files of tokens: who may read them, what may be in them, and that they change at once."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from meshnet.errors import InvalidRequest
from meshnet.security.token_file import MAX_TOKENS, create_file, read_tokens, replace_file, stamp_of
from meshnet.security.tokens import make_token


def written(path: Path, content: str, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_is_read_and_for_its_owner_alone(tmp_path: Path) -> None:
    tokens = (make_token(), make_token())
    before = os.umask(0)
    try:
        create_file(tmp_path / "created", tokens)
        replace_file(tmp_path / "replaced", tokens)
    finally:
        os.umask(before)
    for path in (tmp_path / "created", tmp_path / "replaced"):
        assert mode_of(path) == 0o600
        assert read_tokens(path) == tokens
        assert path.read_text() == f"{tokens[0]}\n{tokens[1]}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["created", "replaced"]


def test_a_file_that_is_there_is_never_created_over(tmp_path: Path) -> None:
    path = written(tmp_path / "token", make_token())
    content = path.read_text()
    with pytest.raises(FileExistsError):
        create_file(path, [make_token()])
    assert path.read_text() == content


def test_what_a_link_points_at_is_replaced(tmp_path: Path) -> None:
    path, link = written(tmp_path / "token", make_token()), tmp_path / "link"
    link.symlink_to(path)
    token = make_token()
    replace_file(link, [token])
    assert link.is_symlink()
    assert read_tokens(path) == read_tokens(link) == (token,)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o601, 0o644, 0o777])
def test_a_file_that_others_have_access_to_is_refused_with_the_command_that_mends_it(tmp_path: Path, mode: int) -> None:
    token = make_token()
    path = written(tmp_path / "a token", token, mode)
    with pytest.raises(InvalidRequest) as caught:
        read_tokens(path)
    assert token not in str(caught.value)
    command = re.search(r"`(chmod .*?)`", str(caught.value))
    assert command
    subprocess.run(command[1], shell=True, check=True)  # noqa: S602 (it is what a person would do)
    assert read_tokens(path) == (token,)


def test_blank_lines_and_ends_of_lines_do_not_matter(tmp_path: Path) -> None:
    first, second = make_token(), make_token()
    assert read_tokens(written(tmp_path / "token", f"\n  {first}\r\n\n{second}")) == (first, second)
    assert read_tokens(written(tmp_path / "readonly", first, 0o400)) == (first,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no token"),
        ("\n \n", "has no token"),
        ("x" * 40 + "\nsecret-but-short\n", "line 2"),
        ("Bearer " + "x" * 40, "line 1"),
        ("ä" * 40, "line 1"),
        ("\xff\xfe" * 40, "line 1"),
        ("\n".join("x" * 40 for _ in range(MAX_TOKENS + 1)), "at most"),
        ("x" * 20000, "over 16384 bytes"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_and_not_what_is_in_it(tmp_path: Path, content: str, said: str) -> None:
    path = written(tmp_path / "token", content)
    with pytest.raises(InvalidRequest, match=said) as caught:
        read_tokens(path)
    for line in content.split():
        assert line not in str(caught.value)


def test_files_that_are_not_there_or_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"`meshnet token .*nowhere` makes one"):
        read_tokens(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_tokens(tmp_path)
    with pytest.raises(InvalidRequest, match="is not a file"):
        read_tokens(Path(os.devnull))


def test_the_stamp_is_another_one_after_each_change(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert stamp_of(path) is None
    stamps = []
    for change in (
        lambda: create_file(path, [make_token()]),
        lambda: replace_file(path, [make_token()]),
        lambda: replace_file(path, [make_token()]),
        lambda: written(path, make_token() * 2),
    ):
        change()
        stamps.append(stamp_of(path))
    assert len(set(stamps)) == len(stamps)
    assert stamp_of(path) == stamps[-1]
