"""What `meshnet describe`, `directives`, `plan` and `events` print."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from meshnet.admin import Event, EventLevel, NodeDescription, PlanPreview
from meshnet.cli.describe import MAX_DIRECTIVES, memory_bar, node_picture
from meshnet.cli.directives import directives_table
from meshnet.cli.events import event_lines
from meshnet.cli.output import format_age
from meshnet.cli.plans import plan_picture
from meshnet.directive import Directive, DirectiveKind, DirectiveState
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Link, Speed
from tests.models import node

LOAD = Directive("d", "a", DirectiveKind.LOAD_SHARD, "m", LayerRange(0, 4), 1, "layers 0-4 of m have no node")
DROP = replace(LOAD, kind=DirectiveKind.DROP_SHARD, layers=LayerRange(4, 6), bytes_total=2_000_000, reason="too many")
NODE = replace(node("a", (0, 4)), vram_bytes=1000)
PLAIN = NodeDescription(NODE, 500, 250, None, (), 2.5)


def text(picture: RenderableType, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(picture)
    return captured.get()


@pytest.mark.parametrize(
    ("used", "free", "bar"),
    [
        (0, 0, "▒" * 40),
        (500, 250, "█" * 20 + "░" * 10 + "▒" * 10),
        (1000, 0, "█" * 40),
        (9999, 9999, "█" * 40),
        (600, 600, "█" * 24 + "░" * 16),
    ],
)
def test_memory_as_a_bar(used: int, free: int, bar: str) -> None:
    assert memory_bar(replace(PLAIN, planned_bytes=used, free_bytes=free)) == bar
    assert len(memory_bar(replace(PLAIN, node=replace(NODE, vram_bytes=0)))) == 40


def test_a_node_in_plain_words() -> None:
    picture = text(node_picture(PLAIN, 0.0))
    for words in ("lends 1.0 kB", "used 500 B", "free 250 B", "kept 250 B", "heard     2.5 s ago", "m      0-4"):
        assert words in picture
    for absent in ("believed", "Speeds", "Links", "Directives", "suspect", "draining"):
        assert absent not in picture


def test_all_that_is_known_of_a_node() -> None:
    measured = replace(
        NODE,
        speeds=(Speed("m", Quantization.INT8, 12345.6, 789.0),),
        links=(Link("", 0.0012, 5e6), Link("b", 0.25)),
        workspace_bytes=7_000_000,
        memory_free_bytes=9_000_000,
        site="cellar",
        draining=True,
        alive=False,
    )
    failed = replace(LOAD, state=DirectiveState.FAILED, failure="out of memory", issued_unix_seconds=1000.0)
    many = (LOAD,) * MAX_DIRECTIVES + (failed,)
    picture = text(node_picture(replace(PLAIN, node=measured, believed_bytes=800, directives=many), 1090.0))
    for words in ("believed to hold 800 B at most", "12,346", "789", "the tracker", "1.2 ms", "5.0 MB/s", "250.0 ms"):
        assert words in picture
    for words in ("cellar", "suspect", "draining", "7.0 MB", "9.0 MB", "out of memory", "90 s", "and 1 before"):
        assert words in picture
    marker = next(line for line in picture.splitlines() if "▲" in line)
    bar = next(line for line in picture.splitlines() if "█" in line)
    assert marker.index("▲") - bar.index("█") == 32


def test_directives_say_how_far_they_are() -> None:
    loading = replace(LOAD, state=DirectiveState.LOADING, bytes_done=25, bytes_total=100, issued_unix_seconds=100.0)
    table = text(directives_table([loading, DROP], now=160.0))
    assert "60 s  a     LOAD m 0-4  LOADING 25%  100 B" in table
    assert "-     a     DROP m 4-6  PENDING      2.0 MB   too many" in table


def test_plans() -> None:
    assert text(plan_picture(PlanPreview((), ()))) == "nothing to do\n"
    picture = text(plan_picture(PlanPreview((LOAD, DROP), ("layers 6-12 of m fit on no node",))))
    assert "a     LOAD   m      0-4     -        layers 0-4 of m have no node" in picture
    assert "a     DROP   m      4-6     2.0 MB   too many" in picture
    assert "layers 6-12 of m fit on no node" in picture
    assert "nothing to do" not in picture


def test_events_are_lines_and_gaps_are_said() -> None:
    info, warning = EventLevel.INFO, EventLevel.WARNING
    events = [Event(7, 0.0, info, "event 7"), Event(8, 0.0, warning, "event 8"), Event(12, 0.0, warning, "lost")]
    lines = [line.plain for line in event_lines(iter(events))]
    assert [line[21:] for line in (lines[0], lines[1], lines[3])] == [
        "info     event 7",
        "warning  event 8",
        "warning  lost",
    ]
    assert lines[2] == "3 events are missing: they came too fast"


def test_ages() -> None:
    ages = [format_age(seconds) for seconds in (None, -1.0, 0.4, 119, 120, 5400, 7200, 200_000)]
    assert ages == ["-", "0 s", "0 s", "119 s", "2 min", "90 min", "2 h", "2 d"]


def test_where_the_weights_of_a_fetching_node_come_from() -> None:
    node_a = replace(NODE, fetches=True, available_models=frozenset())
    fetched = text(node_picture(replace(PLAIN, node=node_a), 0.0))
    assert "fetches weights  yes" in fetched
    assert "no models" in fetched
    assert "fetched" in fetched
    assert "files here" in text(
        node_picture(replace(PLAIN, node=replace(node_a, available_models=frozenset("m"))), 0.0)
    )
    assert "fetches" not in text(node_picture(PLAIN, 0.0))
