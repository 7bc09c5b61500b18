"""Texts that are kept to a grammar: what may follow on them, in the tokens of a vocabulary."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from meshnet.errors import InvalidGrammar, InvalidRequest, UnknownVocabulary
from meshnet.grammars import GrammarKind
from meshnet.vocabulary import Vocabulary, check_vocabulary
from services.node.core.choices import Allowed
from services.node.core.request import GenerationRequest, Grammar
from services.node.grammar_check import LIMITS, GrammarCheck, compilable, refused, words_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

# A large one takes some tens of megabytes.
MAX_VOCABULARIES = 4
NUM_THREADS = 2
NOTHING_GOES_ON = "no token of the vocabulary goes on with the text"
_BITS_OF_A_WORD, _BYTES_OF_A_WORD = 32, 4


class Constraint:
    """The text of one session. What it does takes a thread; one thing at a time."""

    def __init__(
        self, matcher: LLMatcher, kind: GrammarKind, num_tokens: int, stop_token_ids: frozenset[int], threads: Threads
    ) -> None:
        """`num_tokens` are in the vocabulary; the matcher's end of the text comes behind them."""
        self._matcher = matcher
        self._kind = kind
        self._num_tokens = num_tokens
        self._stop_token_ids = stop_token_ids
        self._threads = threads
        self._emitted: list[int] = []

    def emitted(self, token: int) -> None:
        """The text goes on with it."""
        self._emitted.append(token)

    async def allowed(self, draft: Sequence[int]) -> tuple[tuple[int, ...], list[Allowed]]:
        """As much of a draft as the grammar allows, and what may follow on the text and on each token of that.

        Raises InvalidGrammar if it proves too complex on the way.
        """
        emitted, self._emitted = self._emitted, []
        return await self._threads.run(lambda: self._allowed(emitted, draft))

    def _allowed(self, emitted: list[int], draft: Sequence[int]) -> tuple[tuple[int, ...], list[Allowed]]:
        self.consume(emitted)
        found = [self._behind()]
        for token in draft:
            # Behind a token that ends the text nothing is drafted.
            if token in self._stop_token_ids or not self._matcher.try_consume_tokens([token]):
                break
            found.append(self._behind())
        num_drafted = len(found) - 1
        if num_drafted and not self._matcher.rollback(num_drafted):
            raise self._failed()
        return tuple(draft[:num_drafted]), found

    def consume(self, tokens: Sequence[int]) -> None:
        """Raises InvalidGrammar if the grammar does not allow them."""
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise self._failed()

    def _behind(self) -> Allowed:
        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise self._failed()
        may_end = _taken(mask, self._num_tokens)
        del mask[-(-self._num_tokens // _BITS_OF_A_WORD) * _BYTES_OF_A_WORD :]
        is_end = not any(mask)
        if is_end and not may_end:
            raise refused(self._kind, NOTHING_GOES_ON)
        if may_end:
            for token in self._stop_token_ids:
                if token < self._num_tokens:
                    mask[token // 8] |= 1 << token % 8
        return Allowed(bytes(mask), is_end, is_end and not any(mask))

    def _failed(self) -> InvalidGrammar:
        error = self._matcher.get_error() or self._matcher.stop_reason()
        return refused(self._kind, NOTHING_GOES_ON if error.startswith("NoExtension") else words_of(self._kind, error))


class Threads:
    """What the library does, which may take a while."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, "grammar")

    async def run(self, function: Callable[[], T]) -> T:
        """Raises InvalidGrammar for what the library panics at."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: _guarded(function))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class Constraints:
    """Those of one node, and the vocabularies that it was given: the ones that were used last."""

    def __init__(self) -> None:
        self._tokenizers: OrderedDict[str, tuple[LLTokenizer, int]] = OrderedDict()
        self._check = GrammarCheck()
        self._threads = Threads()
        # What takes long, so that no session waits for another's beginning.
        self._openings = Threads()

    async def put(self, vocabulary: Vocabulary) -> None:
        """Raises InvalidRequest if it is not what its id says."""
        tokenizer = await self._openings.run(lambda: _tokenizer(vocabulary))
        self._tokenizers[vocabulary.vocabulary_id] = tokenizer, len(vocabulary.tokens)
        self._tokenizers.move_to_end(vocabulary.vocabulary_id)
        while len(self._tokenizers) > MAX_VOCABULARIES:
            self._tokenizers.popitem(last=False)

    async def open(self, request: GenerationRequest, grammar: Grammar, vocab_size: int) -> Constraint:
        """What was generated before counts as text.

        Raises UnknownVocabulary, or InvalidGrammar for one that makes no sense, costs too much, or does not allow
        what was generated before.
        """
        tokenizer, num_tokens = self._known(grammar.vocabulary_id)
        if num_tokens != vocab_size:
            raise InvalidRequest(f"the vocabulary has {num_tokens} tokens, and the model {vocab_size}")
        compiled = await self._openings.run(lambda: compilable(grammar))
        await self._check.check(grammar, compiled)
        generated = request.prompt[len(request.prompt) - request.num_generated :]

        def begin() -> Constraint:
            matcher = _matcher(tokenizer, grammar.kind, compiled)
            constraint = Constraint(matcher, grammar.kind, num_tokens, request.stop_token_ids, self._threads)
            constraint.consume(generated)
            return constraint

        return await self._openings.run(begin)

    def close(self) -> None:
        self._threads.close()
        self._openings.close()

    def _known(self, vocabulary_id: str) -> tuple[LLTokenizer, int]:
        if vocabulary_id not in self._tokenizers:
            raise UnknownVocabulary(f"vocabulary {vocabulary_id[:80]!r} is not here: put it first")
        self._tokenizers.move_to_end(vocabulary_id)
        return self._tokenizers[vocabulary_id]


class _Tokens:
    """A vocabulary as LLTokenizer takes it. The end of a text is one token more, which no model writes: what ends it is
    for each request to say."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary.tokens)
        self.tokens = (*vocabulary.tokens, b"<end>")
        self.special_token_ids = (*vocabulary.special_token_ids, self.eos_token_id)
        self._ids = {token: index for index, token in enumerate(vocabulary.tokens) if token}
        self._longest = max(map(len, vocabulary.tokens))

    def __call__(self, text: str) -> list[int]:
        """Asked for only by grammars that have text written for the model. The longest token each time."""
        left, found = text.encode(), []
        while left:
            size = next((n for n in range(min(self._longest, len(left)), 0, -1) if left[:n] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[left[:size]])
            left = left[size:]
        return found


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    check_vocabulary(vocabulary)
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise InvalidRequest("this node cannot keep a text to a grammar: it has no llguidance") from None
    tokens: Any = _Tokens(vocabulary)
    return LLTokenizer(tokens)


def _matcher(tokenizer: LLTokenizer, kind: GrammarKind, compiled: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits: dict[str, Any] = LIMITS
    matcher = LLMatcher(tokenizer, compiled, log_level=0, limits=LLParserLimits(**limits))
    if matcher.is_error():
        raise refused(kind, words_of(kind, matcher.get_error()))
    return matcher


def _guarded(function: Callable[[], T]) -> T:
    try:
        return function()
    except BaseException as error:
        # What Rust panics at is no Exception in Python.
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidGrammar(f"the grammar cannot be used: {str(error)[:200]}") from None


def _taken(mask: bytearray, token: int) -> bool:
    """Whether a token is in a mask, from which it is taken."""
    byte, bit = divmod(token, 8)
    found = bool(mask[byte] >> bit & 1)
    mask[byte] &= ~(1 << bit) & 0xFF
    return found
