"""How often, and for how long, a generation is tried at entry nodes."""

from __future__ import annotations

from services.gateway.api_errors import ApiError
from services.gateway.attempts import MAX_ENTRY_NODES_TRIED, Attempts

RESUME_SECONDS = 60.0
ERROR = ApiError(502, "gone")


def test_what_has_not_begun_is_tried_at_a_few() -> None:
    attempts = Attempts(RESUME_SECONDS)
    for index in range(MAX_ENTRY_NODES_TRIED):
        assert attempts.may_go_on(0.0, has_begun=False)
        attempts.failed(f"n{index}", ERROR, 0.0)
    assert not attempts.may_go_on(0.0, has_begun=False)


def test_what_has_begun_is_tried_for_a_time() -> None:
    attempts = Attempts(RESUME_SECONDS)
    for index in range(10):
        attempts.failed(f"n{index}", ERROR, 100.0 + index)
    assert attempts.may_go_on(100.0 + RESUME_SECONDS - 1.0, has_begun=True)
    assert not attempts.may_go_on(100.0 + RESUME_SECONDS, has_begun=True)


def test_with_a_token_all_begins_anew() -> None:
    attempts = Attempts(RESUME_SECONDS)
    attempts.failed("a", ERROR, 0.0)
    attempts.progressed()
    assert not attempts.tried
    attempts.failed("b", ERROR, 1000.0)
    assert (attempts.tried, attempts.may_go_on(1001.0, has_begun=True)) == ({"b"}, True)
