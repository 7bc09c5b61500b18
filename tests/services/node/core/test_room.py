"""Room for a shard, by what is lent and by what is really free."""

from __future__ import annotations

import pytest

from services.node.core.room import Room, shortage

GB = 10**9


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (Room(lent=10 * GB, held=0, workspace=None, device_free=20 * GB), None),
        (Room(lent=4 * GB, held=0, workspace=None, device_free=4 * GB), None),
        (Room(lent=4 * GB - 1, held=0, workspace=None, device_free=20 * GB), "of the 4.0 GB that this node lends"),
        (Room(lent=10 * GB, held=7 * GB, workspace=None, device_free=20 * GB), "7.0 GB are held"),
        (Room(lent=10 * GB, held=6 * GB, workspace=1, device_free=20 * GB), None),
        (
            Room(lent=10 * GB, held=6 * GB, workspace=2 * GB, device_free=20 * GB),
            "steps take 2.0 GB, and 2.0 GB are free",
        ),
        (Room(lent=10 * GB, held=0, workspace=5 * GB, device_free=4 * GB), None),
        (Room(lent=10 * GB, held=0, workspace=None, device_free=4 * GB - 1), "together 4.0 GB; 4.0 GB of the device"),
        (Room(lent=10 * GB, held=0, workspace=None, device_free=None), None),
    ],
)
def test_weights_kv_and_workspace_must_fit(room: Room, said: str | None) -> None:
    short = shortage(room, weights=2 * GB, kv=GB, workspace=GB)
    assert short is None if said is None else said in (short or "")
