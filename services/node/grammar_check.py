"""Grammars are tried in a process of their own before this one compiles them.

The library that compiles them bounds most of what they can cost, but not all: it was seen to overflow the stack on
rules that name one another ten thousand deep, which kills the process, and to work for more than 20 seconds on one
number of a schema.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sys
from collections import OrderedDict
from pathlib import Path

from meshnet.errors import InvalidGrammar
from meshnet.grammars import GrammarKind
from services.node.core.request import Grammar

MAX_GRAMMAR_CHARS = 256 * 1024
# As LLParserLimits takes them. Of its defaults some allow hundreds of megabytes a session.
LIMITS = {"max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}
CPU_SECONDS, WALL_SECONDS = 4, 20.0
MEMORY_BYTES = 512 << 20
STACK_BYTES = 2 << 20
MAX_CHECKS_AT_ONCE = 2
MAX_REMEMBERED = 256
MAX_WORDS = 500

# Else the library writes forced text by itself, for which it would need the model's own tokenizer. The model chooses.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_CHILD = Path(__file__).with_name("grammar_child.py")
_PLACE = re.compile(
    r"\Aat \d+\(\d+\): (?:failed to compile JSON schema: |invalid regex .*? \(in regex\): )?", re.DOTALL
)
_SHOWN_LINES = re.compile(r"^ *\d+ \| .*\Z", re.DOTALL | re.MULTILINE)
TOO_COMPLEX = "it is too complex: compiling it takes too long or too much memory"


def compilable(grammar: Grammar) -> str:
    """As LLMatcher takes it. Raises InvalidGrammar."""
    from llguidance import LLMatcher

    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise InvalidGrammar(f"a grammar of {len(grammar.text)} characters is over the limit of {MAX_GRAMMAR_CHARS}")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            lark = f"start: %json {_one_value(grammar.text)}"
        case GrammarKind.REGEX:
            lark = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]["lark_grammar"]
        case GrammarKind.LARK:
            lark = grammar.text
    return LLMatcher.grammar_from_lark(lark + _NO_FORCING)


def _one_value(text: str) -> str:
    """JSON that is nothing but JSON: it will stand in a grammar."""
    try:
        return json.dumps(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the schema is not JSON: {error}") from None


class GrammarCheck:
    """Remembers what it found."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, str | None] = OrderedDict()
        self._turns = asyncio.Semaphore(MAX_CHECKS_AT_ONCE)

    async def check(self, grammar: Grammar, compiled: str) -> None:
        """`compiled` is what `compilable` made of the grammar. Raises InvalidGrammar with what is wrong with it."""
        key = hashlib.sha256(compiled.encode("utf-8", "surrogatepass")).digest()
        if key not in self._found:
            async with self._turns:
                error = await _tried(compiled)
            self._found[key] = None if error is None else words_of(grammar.kind, error)
            while len(self._found) > MAX_REMEMBERED:
                self._found.popitem(last=False)
        if (words := self._found[key]) is not None:
            raise refused(grammar.kind, words)


def refused(kind: GrammarKind, words: str) -> InvalidGrammar:
    names = {
        GrammarKind.JSON_SCHEMA: "JSON schema",
        GrammarKind.LARK: "grammar",
        GrammarKind.REGEX: "regular expression",
    }
    return InvalidGrammar(f"the {names[kind]} cannot be used: {words}")


def words_of(kind: GrammarKind, error: str) -> str:
    """The library's, without the places in a grammar that the client has not written."""
    if kind is not GrammarKind.LARK:
        error = _SHOWN_LINES.sub("", _PLACE.sub("", error)).strip()
    error = error.replace(_NO_FORCING.strip(), "").removesuffix("\n<non-verbose/>").strip()
    return error if len(error) <= MAX_WORDS else error[:MAX_WORDS] + "..."


async def _tried(compiled: str) -> str | None:
    asked = {
        "grammar": compiled,
        "limits": LIMITS,
        "cpu_seconds": CPU_SECONDS,
        "memory_bytes": MEMORY_BYTES,
        "stack_bytes": STACK_BYTES,
    }
    pipe = asyncio.subprocess.PIPE
    # Isolated: neither the folder that we run in nor the environment is for it.
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(_CHILD), stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(WALL_SECONDS):
            answer, _ = await child.communicate(json.dumps(asked).encode())
    except TimeoutError:
        return TOO_COMPLEX
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await asyncio.shield(child.wait())
    if child.returncode:
        return TOO_COMPLEX
    error: str | None = json.loads(answer)
    return error
