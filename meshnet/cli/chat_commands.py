"""What a line of a chat means: something to say, or a command. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Command(StrEnum):
    HELP = "help"
    CLEAR = "clear"
    SYSTEM = "system"
    RETRY = "retry"
    MODEL = "model"
    TEMPERATURE = "temperature"
    STATS = "stats"
    QUIT = "quit"


# What each takes, and what it does.
COMMANDS: dict[Command, tuple[str, str]] = {
    Command.HELP: ("", "show this"),
    Command.CLEAR: ("", "forget the conversation; the system message stays"),
    Command.SYSTEM: ("[TEXT]", "set the system message, or show it; `/system -` removes it"),
    Command.RETRY: ("", "answer the last question again"),
    Command.MODEL: ("[NAME]", "talk to another model, or show which there are"),
    Command.TEMPERATURE: ("[NUMBER]", "0 always takes the likeliest token, 2 is the most; or show it"),
    Command.STATS: ("", "time to the first token, tokens a second and tokens of the last answer"),
    Command.QUIT: ("", "end; so does Ctrl-D"),
}
_ALIASES = {"exit": Command.QUIT, "q": Command.QUIT, "bye": Command.QUIT, "?": Command.HELP, "h": Command.HELP}
# They would be lost on whoever meant something else by it.
_WITHOUT_ARGUMENT = frozenset(command for command, (argument, _) in COMMANDS.items() if not argument)


@dataclass(frozen=True, slots=True)
class Say:
    """Something to ask the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Do:
    """A command, and what stands behind it."""

    command: Command
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that is neither, and why."""

    reason: str


def parse(line: str) -> Say | Do | Refused | None:
    """None: there is nothing in the line. A line that begins with a space is never a command."""
    text = line.strip()
    if not text:
        return None
    if not line.startswith("/"):
        return Say(text)
    name, _, argument = text[1:].partition(" ")
    command = _command(name.lower())
    if command is None:
        return Refused(f"there is no /{name}: /help shows what there is, and a space before the / makes it text")
    argument = argument.strip()
    if argument and command in _WITHOUT_ARGUMENT:
        return Refused(f"/{command} stands alone")
    return Do(command, argument)


def temperature(text: str) -> float | None:
    """None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= 2 else None


def completions(text: str) -> list[str]:
    """Commands that a line may become."""
    return [f"/{command}" for command in COMMANDS if text.startswith("/") and f"/{command}".startswith(text)]


def help_text() -> str:
    lines = [f"/{command} {argument}".rstrip().ljust(22) + does for command, (argument, does) in COMMANDS.items()]
    return "\n".join([*lines, "Ctrl-C".ljust(22) + "stop an answer; what there is of it stays in the conversation"])


def _command(name: str) -> Command | None:
    if name in _ALIASES:
        return _ALIASES[name]
    return Command(name) if name in set(Command) else None
