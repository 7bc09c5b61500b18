from __future__ import annotations

import pytest

from meshnet.errors import InvalidRequest
from services.tracker.config import Config


def test_defaults_let_four_heartbeats_be_missed() -> None:
    config = Config("127.0.0.1", 7700)
    assert config.lease_seconds / config.heartbeat_seconds > 4
    assert config.tick_seconds == 1.0


def test_a_short_lease_is_looked_at_more_often() -> None:
    assert Config("127.0.0.1", 0, lease_seconds=1.0, heartbeat_seconds=0.2).tick_seconds == 0.25


@pytest.mark.parametrize(
    ("lease", "heartbeat"), [(3.0, 3.0), (1.0, 3.0), (15.0, 0.0), (float("inf"), 3.0), (float("nan"), 3.0)]
)
def test_leases_that_cannot_work_are_refused(lease: float, heartbeat: float) -> None:
    with pytest.raises(InvalidRequest, match="--heartbeat"):
        Config("127.0.0.1", 0, lease_seconds=lease, heartbeat_seconds=heartbeat)


def test_names_and_numbers_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="not a model id"):
        Config("127.0.0.1", 0, deploy=("../m",))
    with pytest.raises(InvalidRequest, match="--kv-tokens"):
        Config("127.0.0.1", 0, kv_tokens=-1)


def test_a_node_is_suspect_after_two_and_a_half_heartbeats() -> None:
    assert Config("127.0.0.1", 0).suspect_after_seconds == 7.5
    assert Config("127.0.0.1", 0, lease_seconds=15.0, heartbeat_seconds=10.0).suspect_after_seconds == 15.0
    assert Config("127.0.0.1", 0, suspect_seconds=4.0).suspect_after_seconds == 4.0


@pytest.mark.parametrize("suspect", [0.0, 3.0, 15.1, float("nan"), float("inf")])
def test_suspicion_lies_between_heartbeat_and_lease(suspect: float) -> None:
    with pytest.raises(InvalidRequest, match="--suspect"):
        Config("127.0.0.1", 0, suspect_seconds=suspect)
