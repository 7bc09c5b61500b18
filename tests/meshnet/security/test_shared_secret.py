"""The secret of a running process, which follows its file."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from meshnet.errors import InvalidRequest, Unauthenticated
from meshnet.security.bearer import bearer
from meshnet.security.shared_secret import LOOK_SECONDS, SharedSecret
from meshnet.security.token_file import replace_file
from meshnet.security.tokens import authorization, make_token

OLD, NEW, OTHER = make_token(), make_token(), make_token()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    replace_file(path, [OLD])
    return path


def accepts(secret: SharedSecret, token: str) -> bool:
    try:
        secret.check(authorization(token))
    except Unauthenticated:
        return False
    return True


def test_the_first_is_sent_and_all_are_accepted(path: Path) -> None:
    replace_file(path, [OLD, NEW])
    secret = SharedSecret(path)
    assert secret.authorization == f"Bearer {OLD}"
    assert accepts(secret, OLD)
    assert accepts(secret, NEW)
    assert not accepts(secret, OTHER)


def test_who_shows_none_is_told_how_to(path: Path) -> None:
    secret = SharedSecret(path)
    for header in (None, "", "Bearer ", f"Basic {OLD}", OLD, f"Bearer {OLD}, Bearer {OLD}", "ä", "\udcff"):
        with pytest.raises(Unauthenticated, match=r"Authorization: Bearer TOKEN.*MESHNET_TOKEN_FILE") as caught:
            secret.check(header)
        assert OLD not in str(caught.value)


def test_a_rotation_never_refuses_what_somebody_may_still_send(path: Path, clock: Clock) -> None:
    """Two processes, of which one reads the file at once and the other has not looked yet."""
    eager, lazy = SharedSecret(path, clock), SharedSecret(path, clock)
    for tokens in ([OLD, NEW], [NEW, OLD], [NEW]):
        replace_file(path, tokens)
        assert eager.authorization == authorization(tokens[0])
        assert accepts(lazy, eager.authorization.removeprefix("Bearer "))
        assert accepts(eager, lazy.authorization.removeprefix("Bearer "))
    clock.now += LOOK_SECONDS
    assert not accepts(eager, OLD)
    assert not accepts(lazy, OLD)


def test_a_token_that_is_gone_is_refused_within_a_second(path: Path, clock: Clock) -> None:
    secret = SharedSecret(path, clock)
    replace_file(path, [NEW])
    clock.now += LOOK_SECONDS
    assert not accepts(secret, OLD)


@pytest.mark.parametrize("fault", ["gone", "mode", "empty"])
def test_a_file_that_breaks_changes_nothing_and_is_said_once(
    path: Path, clock: Clock, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = SharedSecret(path, clock)
    if fault == "gone":
        path.unlink()
    elif fault == "mode":
        path.chmod(0o644)
    else:
        path.write_text("")
    for _ in range(3):
        clock.now += LOOK_SECONDS
        assert accepts(secret, OLD)
        assert not accepts(secret, NEW)
        assert secret.authorization == f"Bearer {OLD}"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert OLD not in caplog.text

    replace_file(path, [NEW])
    assert secret.authorization == f"Bearer {NEW}"


def test_the_file_is_seldom_looked_at_for_what_is_accepted(path: Path, clock: Clock) -> None:
    secret = SharedSecret(path, clock)
    replace_file(path, [NEW])
    assert accepts(secret, OLD), "not looked at yet"
    assert accepts(secret, NEW), "looked at before it is refused"
    assert not accepts(secret, OLD)


def test_no_thread_is_refused_while_another_one_reads(path: Path) -> None:
    """Each shows what it has just read to one that all of them share."""
    secret = SharedSecret(path)
    done = threading.Event()

    def show() -> int:
        shown = 0
        while not done.is_set():
            secret.check(secret.authorization)
            shown += 1
        return shown

    with ThreadPoolExecutor(4) as pool:
        showing = [pool.submit(show) for _ in range(4)]
        for _ in range(50):
            replace_file(path, [NEW, OLD])
            replace_file(path, [OLD, NEW])
        done.set()
        assert all(each.result() for each in showing)


def test_no_text_of_it_has_a_token(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = SharedSecret(path)
    replace_file(path, [NEW])
    assert secret.authorization == f"Bearer {NEW}"
    assert "have changed" in caplog.text
    for text in (repr(secret), str(secret), caplog.text):
        assert OLD not in text
        assert NEW not in text


def test_it_is_not_made_of_a_file_that_is_not_in_order(path: Path) -> None:
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        SharedSecret(path)


def test_requests_of_httpx_show_the_token_of_the_moment(path: Path) -> None:
    shown: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        shown.append(request.headers.get("Authorization"))
        return httpx.Response(200)

    with httpx.Client(transport=httpx.MockTransport(answer), auth=bearer(SharedSecret(path))) as client:
        client.get("http://node/models")
        replace_file(path, [NEW])
        client.get("http://node/models")
    assert shown == [f"Bearer {OLD}", f"Bearer {NEW}"]
    assert bearer(None) is None
