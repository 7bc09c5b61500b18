"""Prefix reuse over three nodes on real sockets: chats, shared prompts, pressure, hops that have lost what they kept.

Each node's executor says which tokens each session had in its KV cache, and how many were run.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from meshnet.errors import MeshnetError
from services.node.core.compression import Compression
from services.node.core.members import LostNode
from services.node.core.request import GenerationRequest
from services.node.entry import EntryPoint
from services.node.events import MAX_UNREAD_TOKENS
from tests.services.node.shells import NUM_LAYERS, VOCABULARY, Shell, three_nodes
from tests.services.node.test_generation import run, until, until_idle

SYSTEM = tuple(random.Random(0).randrange(VOCABULARY) for _ in range(300))


@dataclass(frozen=True)
class Answer:
    """`num_run`: tokens that the last node ran for it."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    cached: int
    num_run: int

    @property
    def text(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.tokens)


def words(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCABULARY) for _ in range(count))


async def ask(nodes: dict[str, Shell], prompt: tuple[int, ...], new: int = 5) -> Answer:
    """A generation, once it has been seen that all its tokens went through all layers in their places."""
    request = GenerationRequest(str(uuid.uuid4()), "m", prompt, new)
    before = nodes["c"].executor.num_run
    events = [event async for event in nodes["a"].entry.generate(request)]
    tokens = tuple(event.token_id for event in events if event.token_id is not None)
    assert tokens == tuple((prompt[-1] + NUM_LAYERS * count) % VOCABULARY for count in range(1, new + 1))
    for shell in nodes.values():
        assert shell.executor.seen[request.request_id] == [*prompt, *tokens[:-1]]
        shell.sessions.check_integrity()
    assert not any(event.cached_tokens for event in events[1:])
    return Answer(request, tokens, events[0].cached_tokens, nodes["c"].executor.num_run - before)


def kept(shell: Shell) -> int:
    return shell.sessions.ledger("m").kept_tokens


@pytest.mark.parametrize("compression", [Compression.OFF, Compression.ZSTD])
async def test_a_chat_goes_on_from_what_it_left(compression: Compression) -> None:
    async with three_nodes(compression=compression) as nodes:
        text = SYSTEM
        for turn in range(5):
            answer = await ask(nodes, (*text, *words(turn, 60)))
            # All whole blocks of the turn before, whose last token was drawn and never run.
            whole = (len(text) - 1) // 128 * 128 if turn else 0
            assert answer.cached == whole
            assert answer.num_run == len(answer.text) - 1 - whole
            text = answer.text
        await until_idle(nodes)
        # The cache was taken over from turn to turn.
        assert {shell.sessions.num_kept for shell in nodes.values()} == {1}


async def test_prompts_that_begin_alike_share_what_they_have_in_common() -> None:
    async with three_nodes() as nodes:
        await ask(nodes, (*SYSTEM, *words(1, 200)))
        for other in (2, 3):
            answer = await ask(nodes, (*SYSTEM, *words(other, 200)))
            assert answer.cached == 256
            assert answer.num_run == 500 + 4 - 256
        await until_idle(nodes)
        assert {shell.sessions.num_kept for shell in nodes.values()} == {3}


@pytest.mark.parametrize(
    ("length", "reused"), [(128, 0), (144, 0), (145, 128), (255, 128), (272, 128), (273, 256), (400, 256)]
)
async def test_the_last_tokens_of_a_prompt_are_always_run(length: int, reused: int) -> None:
    async with three_nodes() as nodes:
        await ask(nodes, SYSTEM)
        assert (await ask(nodes, (SYSTEM + SYSTEM)[:length])).cached == reused
        await until_idle(nodes)


async def test_prompts_begin_with_what_a_running_session_has() -> None:
    async with three_nodes(kv_tokens=4096) as nodes:
        running = GenerationRequest(str(uuid.uuid4()), "m", (*SYSTEM, 1), 1000)
        async with aclosing(nodes["a"].entry.generate(running)) as events:
            await anext(events)
            assert (await ask(nodes, (*SYSTEM, *words(1, 200)))).cached == 256
            assert running.request_id in {key.session for key in nodes["b"].executor.cached}
        await until_idle(nodes)


async def test_many_at_once_each_get_what_they_get_alone() -> None:
    # Room for a few of them: what is kept is given up, sessions wait for each other, and all end.
    async with three_nodes(kv_tokens=2048) as nodes:
        draw = random.Random(7)

        async def chat(seed: int) -> None:
            text = SYSTEM[: draw.randrange(300)]
            for turn in range(4):
                request = GenerationRequest(str(uuid.uuid4()), "m", (*text, *words(seed + turn, 90)), 20)
                tokens = await run(nodes["a"], request)
                for shell in nodes.values():
                    assert shell.executor.seen[request.request_id] == [*request.prompt, *tokens[:-1]]
                text = (*request.prompt, *tokens)

        await asyncio.gather(*(chat(1000 * seed) for seed in range(8)))
        await until_idle(nodes)


async def test_what_is_kept_is_given_up_for_sessions_and_never_makes_them_wait() -> None:
    async with three_nodes(kv_tokens=1024, admission_timeout=0.2) as nodes:
        for seed in range(6):
            answer = await ask(nodes, words(seed, 500), 12)
            assert answer.cached == 0
        # Of 511 tokens three blocks are whole: two sessions' fit.
        assert {kept(shell) for shell in nodes.values()} == {768}
        # All the room there is.
        whole = await ask(nodes, words(99, 1000), 24)
        assert whole.cached == 0
        await until_idle(nodes)
        assert (await ask(nodes, whole.request.prompt, 24)).cached == 896


async def test_without_room_for_both_a_copy_becomes_the_only_one() -> None:
    async with three_nodes(kv_tokens=768) as nodes:
        first = await ask(nodes, words(1, 520), 5)
        assert (await ask(nodes, (*first.text[:400], *words(2, 200)), 5)).cached == 384
        await until_idle(nodes)
        # Now the first is gone, on all nodes.
        assert {shell.sessions.num_kept for shell in nodes.values()} == {1}


@pytest.mark.parametrize("forgetful", ["b", "c"])
async def test_a_hop_that_has_lost_what_it_kept_costs_a_prefill_and_nothing_else(forgetful: str) -> None:
    async with three_nodes() as nodes:
        first = await ask(nodes, SYSTEM)
        shell = nodes[forgetful]
        shell.forwarding.close(shell.sessions.keys_of(first.request.request_id))
        again = await ask(nodes, (*first.text, *words(1, 300)))
        assert again.cached == 0
        await until_idle(nodes)
        # Nothing is left of the first, anywhere; the second is kept whole.
        assert {shell.sessions.num_kept for shell in nodes.values()} == {1}
        assert (await ask(nodes, (*again.text, 1))).cached == 512


async def test_a_running_session_survives_that_a_hop_cannot_copy_from_it() -> None:
    async with three_nodes(kv_tokens=4096) as nodes:
        running = GenerationRequest(str(uuid.uuid4()), "m", (*SYSTEM, 1), 200)
        async with aclosing(nodes["a"].entry.generate(running)) as events:
            await anext(events)
            (key,) = nodes["c"].sessions.keys_of(running.request_id)
            # Until it pauses for its reader: each frame of its own says where it begins.
            await until(lambda: nodes["c"].executor.cached[key] > len(running.prompt) + MAX_UNREAD_TOKENS)
            # As if it had begun elsewhere.
            nodes["c"].sessions._sessions[key].entry = "stranger"
            assert (await ask(nodes, (*SYSTEM, *words(1, 200)))).cached == 0
            assert len([event async for event in events]) == 199
        await until_idle(nodes)


async def test_an_executor_that_lacks_what_it_kept_costs_a_prefill_and_nothing_else() -> None:
    for node_id in "abc":
        async with three_nodes() as nodes:
            first = await ask(nodes, SYSTEM)
            executor = nodes[node_id].executor
            executor.cached.clear()
            executor.held.clear()
            assert (await ask(nodes, (*first.text, *words(1, 300)))).cached == 0
            await until_idle(nodes)


async def test_what_was_cached_when_a_client_left_is_kept() -> None:
    async with three_nodes() as nodes:
        request = GenerationRequest(str(uuid.uuid4()), "m", (*SYSTEM, 1), 1000)
        async with aclosing(nodes["a"].entry.generate(request)) as events:
            async for _ in events:
                break
        await until_idle(nodes)
        assert {kept(shell) for shell in nodes.values()} == {256}
        assert (await ask(nodes, (*SYSTEM, 1))).cached == 256


async def test_a_prefill_that_is_aborted_keeps_what_came_back() -> None:
    async with three_nodes() as nodes:
        gate = nodes["c"].executor.gate
        request = GenerationRequest(str(uuid.uuid4()), "m", (*words(1, 1000), 1), 10)
        running = asyncio.create_task(ask_quietly(nodes["a"].entry, request))
        await until(lambda: nodes["a"].executor.num_run >= 128)
        await nodes["a"].entry.abort(request.request_id)
        await running
        assert gate.is_set()
        await until_idle(nodes)
        lengths = {shell.sessions.ledger("m").kept_tokens for shell in nodes.values()}
        assert len(lengths) == 1
        assert (await ask(nodes, request.prompt)).cached == lengths.pop()


async def ask_quietly(entry: EntryPoint, request: GenerationRequest) -> None:
    async for _ in entry.generate(request):
        pass


async def test_nothing_is_kept_of_what_failed() -> None:
    async with three_nodes() as nodes:
        nodes["b"].executor.fail = ValueError("broken")
        with pytest.raises(MeshnetError):
            await ask(nodes, SYSTEM)
        nodes["b"].executor.fail = None
        await until_idle(nodes)
        assert {shell.sessions.num_kept for shell in nodes.values()} == {0}


async def test_what_is_kept_goes_with_the_node_where_it_began() -> None:
    async with three_nodes() as nodes:
        await ask(nodes, SYSTEM)
        await until_idle(nodes)
        nodes["b"].forwarding.node_lost(LostNode("c", "was lost"))
        assert kept(nodes["b"]) == 256
        nodes["b"].forwarding.node_lost(LostNode("a", "was lost"))
        assert kept(nodes["b"]) == 0
        await until_idle(nodes)


async def test_a_generation_may_be_repeated_under_its_old_name() -> None:
    async with three_nodes() as nodes:
        first = await ask(nodes, SYSTEM)
        for prompt in (words(1, 400), SYSTEM):
            request = GenerationRequest(first.request.request_id, "m", prompt, 5)
            events = [event async for event in nodes["a"].entry.generate(request)]
            assert events[0].cached_tokens == 0
            for shell in nodes.values():
                assert shell.executor.seen[request.request_id][: len(prompt)] == list(prompt)
        assert (await ask(nodes, (*SYSTEM, 3))).cached == 256
        await until_idle(nodes)


@pytest.mark.parametrize("everywhere", [True, False])
async def test_reuse_can_be_turned_off(everywhere: bool) -> None:
    async with three_nodes(prefix_reuse=not everywhere) as nodes:
        nodes["b"].forwarding._keeps = False
        first = await ask(nodes, SYSTEM)
        assert (await ask(nodes, first.text)).cached == 0
        await until_idle(nodes)
        assert nodes["b"].sessions.num_kept == 0
        assert not nodes["b"].executor.cached
