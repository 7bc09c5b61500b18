"""Texts that are kept to a grammar, over real sockets: what is drawn, and what is refused before anything is done."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from llguidance import LLMatcher, LLTokenizer

from meshnet import rpc
from meshnet.errors import InvalidGrammar, InvalidRequest, UnknownVocabulary
from meshnet.grammars import GrammarKind
from meshnet.v1 import inference_pb2, inference_pb2_grpc
from meshnet.vocabulary import Vocabulary, vocabulary_of
from services.node import grammar_check
from services.node.constraint import MAX_VOCABULARIES, _Tokens
from services.node.core.choices import Choice
from services.node.core.request import FinishReason, GenerationRequest, Grammar
from services.node.core.speculation import NewLimit, no_drafts
from services.node.core.work import Result, SampleWork, Sampling, Work
from services.node.inference_servicer import InferenceServicer
from tests.services.node.shells import VOCABULARY, CountingExecutor, Shell, three_nodes
from tests.services.node.test_asking import PENALIZED, events_of
from tests.services.node.test_generation import run, until_idle
from tests.services.node.test_speculation import STAGES, forced

_PIECES = [
    *'{}[]",:. \n-0123456789abcdefghij', "true", "false", "null", '{"', '":', '", "', '"}', "ab", "abc", "12", "}]",
    "é", "日", "<stop>", "<other>", "",
]  # fmt: skip
_RAW = [b"\xe6", b"\x97", b"\xa5"]
TOKENS = [piece.encode() for piece in _PIECES] + _RAW
TOKENS += [b""] * (VOCABULARY - len(TOKENS))
STOP, OTHER_STOP = TOKENS.index(b"<stop>"), TOKENS.index(b"<other>")
WORDS = vocabulary_of(TOKENS, [STOP, OTHER_STOP])
STOPS = frozenset({STOP, OTHER_STOP})

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 6},
        "b": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 4},
        "c": {"enum": ["abc", "日", True, None]},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def grammar(kind: GrammarKind, text: str) -> Grammar:
    return Grammar(kind, text, WORDS.vocabulary_id)


JSON = grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
REGEX = grammar(GrammarKind.REGEX, r"[a-c]{3,9}(/|1)?2")
LARK = grammar(GrammarKind.LARK, 'start: "[" item ("," item)* "]"\nitem: /[a-j]{1,3}/ | start')


@dataclass
class MaskedExecutor(CountingExecutor):
    """Draws evenly of what is allowed; greedily, the first allowed token from the one on that it would choose."""

    def _run(self, work: Work) -> Result:
        result = super()._run(work)
        if not isinstance(work, SampleWork) or work.place.allowed is None:
            return result
        assert isinstance(result, Choice)
        bits = int.from_bytes(work.place.allowed, "little")
        allowed = [i for i in range(VOCABULARY) if bits >> i & 1 and i not in work.place.barred]
        if not allowed:
            return InvalidRequest("nothing is left")
        if work.sampling.temperature:
            return Choice(allowed[int(work.uniform * len(allowed))])
        return Choice(next((i for i in allowed if i >= result.token_id), allowed[0]))


def asked_of(what: Grammar, new: int = 200, start: int = 0, **more: Any) -> GenerationRequest:
    prompt = tuple((start + 12 * index) % VOCABULARY for index in range(20))
    fields: dict[str, Any] = {"stop_token_ids": STOPS, "sampling": Sampling(1.0), "seed": start, **more}
    return GenerationRequest(str(uuid.uuid4()), "m", prompt, new, grammar=what, **fields)


def again(asked: GenerationRequest) -> GenerationRequest:
    return replace(asked, request_id=str(uuid.uuid4()))


def text_of(tokens: list[int]) -> str:
    """Without the stop token. Raises UnicodeDecodeError where bytes are no text."""
    return b"".join(TOKENS[token] for token in tokens if token not in STOPS).decode()


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["a", "b", "c"]
    assert len(value["a"]) <= 6
    assert len(value["b"]) <= 4
    assert all(type(item) is int and -9 <= item <= 99 for item in value["b"])
    assert value["c"] in ["abc", "日", True, None]


def check_lark(text: str) -> None:
    """The library's own matcher, given the bytes one by one."""
    single_bytes: Any = _Tokens(vocabulary_of([bytes([byte]) for byte in range(256)], []))
    matcher = LLMatcher(LLTokenizer(single_bytes), LLMatcher.grammar_from_lark(LARK.text))
    assert matcher.consume_tokens(list(text.encode()))
    assert matcher.is_accepting()


def check_regex(text: str) -> None:
    assert re.fullmatch(REGEX.text, text)


CHECKS = [(JSON, check_json), (REGEX, check_regex), (LARK, check_lark)]


@pytest.mark.parametrize("splits", STAGES)
@pytest.mark.parametrize(("what", "check"), CHECKS)
async def test_all_that_is_drawn_is_of_the_grammar_with_drafts_and_without(
    splits: Any, what: Grammar, check: Any
) -> None:
    samplings = [Sampling(1.0), Sampling(0.0), replace(PENALIZED, temperature=0.7)]
    asked = [asked_of(what, start=i, sampling=samplings[i % 3], top_logprobs=None) for i in range(12)]
    answers = []
    for new_limit in (no_drafts, forced):
        async with three_nodes(
            splits=splits, new_executor=MaskedExecutor, new_limit=new_limit, kv_tokens=8192
        ) as nodes:
            await nodes["a"].entry.constraints.put(WORDS)
            answers.append(await asyncio.gather(*(run(nodes["a"], again(one)) for one in asked)))
            counts = nodes["a"].entry.draft_counts
            await until_idle(nodes)
    plain, drafted = answers
    assert drafted == plain
    assert counts.drafted > 0
    for one, tokens in zip(asked, plain, strict=True):
        # Lists in lists may go on as long as they like.
        if tokens[-1] in STOPS:
            check(text_of(tokens))
        else:
            assert len(tokens) == one.max_new_tokens
            assert what is LARK
    assert len({tuple(tokens) for tokens in plain}) > 6


@pytest.mark.parametrize("new_limit", [no_drafts, forced])
@pytest.mark.parametrize(("what", "check"), CHECKS[:2])
async def test_a_text_that_was_cut_anywhere_goes_on_in_its_grammar(
    new_limit: NewLimit, what: Grammar, check: Any
) -> None:
    async with three_nodes(new_executor=MaskedExecutor, new_limit=new_limit, kv_tokens=4096) as nodes:
        await nodes["a"].entry.constraints.put(WORDS)
        asked = asked_of(what, start=7)
        whole = await run(nodes["a"], asked)
        check(text_of(whole))
        for cut in range(1, len(whole)):
            rest = replace(again(asked), prompt=(*asked.prompt, *whole[:cut]), num_generated=cut)
            assert whole[:cut] + await run(nodes["a"], rest) == whole
        await until_idle(nodes)


async def test_what_was_generated_before_must_be_of_the_grammar() -> None:
    async with three_nodes(new_executor=MaskedExecutor) as nodes:
        await nodes["a"].entry.constraints.put(WORDS)
        asked = replace(asked_of(JSON), num_generated=3)
        with pytest.raises(InvalidRequest, match="JSON schema cannot be used"):
            await run(nodes["a"], asked)
        await until_idle(nodes)


async def test_a_grammar_that_ends_takes_a_stop_token_or_none_if_there_is_none() -> None:
    what = grammar(GrammarKind.REGEX, "abc")
    async with three_nodes(new_executor=MaskedExecutor) as nodes:
        await nodes["a"].entry.constraints.put(WORDS)
        for stops in (STOPS, frozenset({STOP}), frozenset()):
            # However early it is.
            events = await events_of(nodes["a"], asked_of(what, stop_token_ids=stops, min_new_tokens=9))
            tokens = [event.token_id for event in events if event.token_id is not None]
            assert text_of(tokens) == "abc"
            assert (tokens[-1] in STOPS) == bool(stops)
            assert [event.finish_reason for event in events][-1] is FinishReason.STOP
        # Where the text may go on it is not.
        longer = asked_of(grammar(GrammarKind.REGEX, "(a|b|1)+"), 30, min_new_tokens=20)
        for seed in range(5):
            assert len(await run(nodes["a"], replace(again(longer), seed=seed))) >= 20
        await until_idle(nodes)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Shell, inference_pb2_grpc.InferenceStub]]:
    async with three_nodes(new_executor=MaskedExecutor) as nodes:
        server = rpc.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(nodes["a"].entry), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield nodes["a"], inference_pb2_grpc.InferenceStub(channel)
        await server.stop(None)
        await until_idle(nodes)


def message(vocabulary: Vocabulary = WORDS, **kind: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=str(uuid.uuid4()),
        model_id="m",
        prompt_token_ids=[0, 1, 2],
        max_new_tokens=200,
        stop_token_ids=[STOP],
        sampling=inference_pb2.SamplingParams(temperature=1, seed=3),
        grammar=inference_pb2.Grammar(vocabulary_id=vocabulary.vocabulary_id, **kind),
    )


def put(vocabulary: Vocabulary) -> inference_pb2.Vocabulary:
    return inference_pb2.Vocabulary(
        vocabulary_id=vocabulary.vocabulary_id,
        tokens=vocabulary.tokens,
        special_token_ids=vocabulary.special_token_ids,
    )


async def failure(call: Any) -> tuple[str | None, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [event async for event in call] if hasattr(call, "__aiter__") else await call
    return rpc.error_code(caught.value), caught.value.details() or ""


async def test_a_vocabulary_is_given_once_and_the_oldest_is_let_go(served: Any) -> None:
    shell, stub = served
    asked = message(json_schema=JSON.text)
    assert (await failure(stub.Generate(asked)))[0] == UnknownVocabulary.code
    assert not shell.executor.steps, "nothing was done"
    await stub.PutVocabulary(put(WORDS))
    check_json(text_of([event.token_id async for event in stub.Generate(asked)]))
    for index in range(MAX_VOCABULARIES):
        other = vocabulary_of([*TOKENS, b"x" * (index + 1)], [STOP])
        await stub.PutVocabulary(put(other))
        code, words = await failure(stub.Generate(message(other, regex="a")))
        assert (code, words) == (InvalidRequest.code, "the vocabulary has 101 tokens, and the model 100")
    assert (await failure(stub.Generate(message(regex="a"))))[0] == UnknownVocabulary.code


async def test_a_vocabulary_is_what_its_id_says(served: Any) -> None:
    _, stub = served
    whole = put(WORDS)
    for changed in (
        inference_pb2.Vocabulary(vocabulary_id=whole.vocabulary_id, tokens=whole.tokens),
        inference_pb2.Vocabulary(vocabulary_id="0" * 64, tokens=whole.tokens, special_token_ids=[1]),
        inference_pb2.Vocabulary(vocabulary_id=whole.vocabulary_id),
        inference_pb2.Vocabulary(vocabulary_id=whole.vocabulary_id, tokens=[b"a"], special_token_ids=[1]),
        inference_pb2.Vocabulary(vocabulary_id=whole.vocabulary_id, tokens=[b"a" * 2000]),
    ):
        assert (await failure(stub.PutVocabulary(changed)))[0] == InvalidRequest.code


async def test_a_vocabulary_of_256_thousand_tokens_fits_into_a_message(served: Any) -> None:
    _, stub = served
    large = vocabulary_of([b"%08x" % index for index in range(262_144)], [0, 7])
    await stub.PutVocabulary(put(large))
    code, words = await failure(stub.Generate(message(large, regex="a")))
    assert (code, "262144" in words) == (InvalidRequest.code, True)


LONG_CHAIN = "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(10_000)) + 'a10000: "x"'
REFUSED = [
    ({"json_schema": "{"}, "the schema is not JSON"),
    ({"json_schema": "[" * 100_000}, "the schema is not JSON"),
    ({"json_schema": "5"}, "JSON schema cannot be used: schema must be an object or boolean"),
    ({"json_schema": '{"type": "objekt"}'}, "JSON schema cannot be used: Invalid type: objekt"),
    ({"json_schema": '{"not": {}}'}, 'JSON schema cannot be used: Unimplemented keys: ..not'),
    ({"json_schema": '{"$ref": "http://127.0.0.1/x"}'}, "retrieving it failed"),
    ({"json_schema": '{"type": "string", "minLength": 3, "maxLength": 2}'}, "Unsatisfiable"),
    ({"json_schema": '{"a": 1} "x"'}, "the schema is not JSON"),
    ({"json_schema": '{"type": "string", "pattern": "("}'}, "unclosed group"),
    ({"regex": "("}, "regular expression cannot be used: .*unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"lark": "start: foo"}, "grammar cannot be used: .*unknown name"),
    ({"lark": "start: ("}, "Expected token"),
    ({"lark": ""}, "grammar cannot be used"),
    ({"lark": " " * 300_000}, "over the limit of 262144"),
    ({"lark": LONG_CHAIN}, "too complex"),
    ({"json_schema": '{"type": "integer", "multipleOf": 99999989}'}, "too complex"),
    ({"lark": "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(60)) + 'A60: "x"'}, "too big"),
    ({}, "no known kind"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "said"), REFUSED)
async def test_bad_grammars_are_refused_with_the_reason_and_the_node_lives_on(
    served: Any, kind: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "CPU_SECONDS", 1)
    shell, stub = served
    await stub.PutVocabulary(put(WORDS))
    for _ in range(2):
        code, words = await failure(stub.Generate(message(**kind)))
        assert code == InvalidGrammar.code
        assert re.search(said, words, re.DOTALL), words
        assert "no_forcing" not in words
        assert len(words) < 1000
    assert not shell.executor.steps, "nothing was done"
    check_regex(text_of([event.token_id async for event in stub.Generate(message(regex=REGEX.text))]))


async def test_a_grammar_that_the_vocabulary_cannot_write_is_refused_where_it_ends(served: Any) -> None:
    _, stub = served
    await stub.PutVocabulary(put(WORDS))
    code, words = await failure(stub.Generate(message(regex="abcZ")))
    assert (code, "no token of the vocabulary" in words) == (InvalidGrammar.code, True), words
