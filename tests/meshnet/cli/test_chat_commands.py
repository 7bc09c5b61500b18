"""What a line of a chat means."""

from __future__ import annotations

import pytest

from meshnet.cli.chat_commands import COMMANDS, Command, Do, Refused, Say, completions, help_text, parse, temperature


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("", None),
        ("  \n", None),
        ("hello there\n", Say("hello there")),
        (" /clear is a command\n", Say("/clear is a command")),
        ("/clear", Do(Command.CLEAR)),
        ("/CLEAR  ", Do(Command.CLEAR)),
        ("/system  You are brief. \n", Do(Command.SYSTEM, "You are brief.")),
        ("/system", Do(Command.SYSTEM)),
        ("/model org/name", Do(Command.MODEL, "org/name")),
        ("/temperature 0.7", Do(Command.TEMPERATURE, "0.7")),
        ("/exit", Do(Command.QUIT)),
        ("/?", Do(Command.HELP)),
    ],
)
def test_lines(line: str, meant: Say | Do | None) -> None:
    assert parse(line) == meant


@pytest.mark.parametrize("line", ["/", "/nothing", "/clearly", "/usr/bin is a path", "/retry later", "/quit now"])
def test_what_is_no_command_is_refused_with_a_reason(line: str) -> None:
    refused = parse(line)
    assert isinstance(refused, Refused)
    assert refused.reason


def test_help_and_completion_know_every_command() -> None:
    assert set(COMMANDS) == set(Command)
    assert all(f"/{command}" in help_text() for command in Command)
    assert completions("/s") == ["/system", "/stats"]
    assert completions("s") == completions("/zzz") == []


def test_temperatures_are_those_of_the_api() -> None:
    assert [temperature(text) for text in ("0", "2", "0.5", "-1", "2.1", "nan", "warm", "")] == [0, 2, 0.5, *[None] * 5]
