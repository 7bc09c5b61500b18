"""`meshnet chat` and the demo's question: a conversation with a model through the gateway."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from types import ModuleType

import typer

from meshnet.cli.chat_client import Answering, ChatFailed, model_names, stream_chat
from meshnet.cli.chat_commands import Command, Do, Refused, Say, completions, help_text, parse, temperature
from meshnet.cli.conversation import Conversation, Stats

PROMPT = "> "
# A model may write what a terminal would obey.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def run_chat(answering: Answering, system: str | None) -> bool:
    """Reads questions until end of file. Returns whether the last answer was whole.

    At a terminal it has a prompt and edits lines; else it prints answers and nothing but answers.
    """
    chat = Chat(answering, Conversation(system), at_terminal=sys.stdin.isatty())
    chat.run()
    return chat.succeeded


def print_answer(answering: Answering, conversation: Conversation) -> tuple[Stats, str]:
    """Streams an answer to the terminal, and adds to the conversation what has come of it, whatever ends it.

    Returns what it took and why it ended. Raises ChatFailed.
    """
    stats = Stats(time.monotonic())
    reason = ""
    try:
        with contextlib.closing(stream_chat(answering, conversation.messages)) as parts:
            for part in parts:
                if part.text:
                    stats.piece(time.monotonic())
                    # Before it is shown: nothing that was seen may be missing from the conversation.
                    conversation.answered(part.text)
                    typer.echo(part.text.translate(_CONTROLS), nl=False)
                stats.usage = part.usage or stats.usage
                reason = part.finish_reason or reason
    except BaseException:
        if stats.first is not None:
            typer.echo()
        raise
    typer.echo()
    return stats, reason


class Chat:
    """One session at a terminal, or over a pipe."""

    def __init__(self, answering: Answering, conversation: Conversation, *, at_terminal: bool) -> None:
        self.answering = answering
        self.conversation = conversation
        self.succeeded = True
        self._at_terminal = at_terminal
        self._stats: Stats | None = None
        self._is_answering = False
        self._done = False
        self._commands: dict[Command, Callable[[str], None]] = {
            Command.HELP: lambda _: typer.echo(help_text()),
            Command.CLEAR: self._clear,
            Command.SYSTEM: self._system,
            Command.RETRY: self._retry,
            Command.MODEL: self._model,
            Command.TEMPERATURE: self._temperature,
            Command.STATS: self._show_stats,
            Command.QUIT: self._quit,
        }

    def run(self) -> None:
        if self._at_terminal:
            _edit_lines()
            typer.echo(f"Chatting with {self.answering.model}. Ctrl-C stops an answer, Ctrl-D ends, /help says more.")
        while not self._done:
            try:
                self._turn()
            except KeyboardInterrupt:
                # Of an answer, or of a line that was being typed.
                typer.echo("[stopped]" if self._is_answering else "")

    def _turn(self) -> None:
        self._is_answering = False
        try:
            line = self._read()
        except EOFError:
            if self._at_terminal:
                typer.echo()
            self._done = True
            return
        match parse(line):
            case Say(text):
                self.conversation.ask(text)
                self._answer()
            case Do(command, argument):
                self._commands[command](argument)
            case Refused(reason):
                self._complain(reason)

    def _read(self) -> str:
        if not self._at_terminal:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line
        typer.echo()
        return input(PROMPT)

    def _answer(self) -> None:
        self._is_answering = True
        self._stats, self.succeeded = None, False
        try:
            self._stats, reason = print_answer(self.answering, self.conversation)
        except ChatFailed as error:
            self._complain(str(error))
            return
        self.succeeded = True
        if reason == "length" and self._at_terminal:
            typer.echo("[cut: it has as many tokens as it may have]")

    def _complain(self, reason: str) -> None:
        typer.echo(f"[{reason}]", err=True)

    def _clear(self, _: str) -> None:
        self.conversation.clear()

    def _quit(self, _: str) -> None:
        self._done = True

    def _retry(self, _: str) -> None:
        if self.conversation.take_back():
            self._answer()
        else:
            self._complain("there is no question yet")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "-" else text
        else:
            typer.echo(self.conversation.system or "there is no system message")

    def _temperature(self, text: str) -> None:
        if not text:
            typer.echo(f"{self.answering.temperature:g}")
        elif (value := temperature(text)) is None:
            self._complain(f"{text} is no number from 0 to 2")
        else:
            self.answering = dataclasses.replace(self.answering, temperature=value)

    def _model(self, name: str) -> None:
        try:
            names = model_names(self.answering.url, self.answering.secret)
        except ChatFailed as error:
            self._complain(str(error))
            return
        if name in names:
            self.answering = dataclasses.replace(self.answering, model=name)
        elif name:
            self._complain(f"there is no model {name}; the mesh has {', '.join(names)}")
        else:
            typer.echo("\n".join(f"{'*' if each == self.answering.model else ' '} {each}" for each in names))

    def _show_stats(self, _: str) -> None:
        typer.echo(self._stats.text() if self._stats else "there is no answer yet")


def _edit_lines() -> None:
    """Keys edit lines, the arrows bring back earlier ones, and tab completes commands, where Python has readline."""
    readline = _readline()
    if readline is None:
        return
    readline.set_completer_delims("")
    readline.set_completer(lambda text, state: dict(enumerate(completions(text))).get(state))
    # libedit, on some systems in the place of readline, has a language of its own.
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline
