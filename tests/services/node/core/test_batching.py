"""The choice of the next step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshnet.model import LayerRange
from services.node.core.batching import DECODED_TOKENS, choose_batch
from services.node.core.work import (
    CacheWork,
    ForwardWork,
    FreeWork,
    KeepWork,
    PromptWork,
    ReuseWork,
    SampleWork,
    Sampling,
    ScoreWork,
    Segment,
    SessionKey,
    Work,
)

LAYERS = LayerRange(0, 4)


def forward(session: str, tokens: int = 1, layers: LayerRange = LAYERS) -> ForwardWork:
    key = SessionKey(session, "m", layers)
    return ForwardWork("m", layers, (Segment(key, 0, tokens, 1),), b"")


def key(session: str) -> SessionKey:
    return SessionKey(session, "m", LAYERS)


def prompt(session: str, tokens: int = 1) -> PromptWork:
    return PromptWork("m", LAYERS, (Segment(SessionKey(session, "m", LAYERS), 0, tokens, 1),), (0,) * tokens)


SAMPLE = SampleWork("m", b"", Sampling(), 0.0)
SCORE = ScoreWork("m", b"", (1, 2), 0)


def test_the_decodes_of_many_sessions_share_a_step() -> None:
    assert choose_batch([forward("a"), forward("b"), forward("c")]) == [0, 1, 2]


def test_works_of_one_session_never_share_a_step_nor_overtake() -> None:
    assert choose_batch([forward("a"), forward("a"), forward("b")]) == [0, 2]
    # The free of a session must not run before its queued frame, nor a frame before a free.
    free = FreeWork((SessionKey("a", "m", LAYERS),))
    assert choose_batch([forward("a"), free]) == [0]
    assert choose_batch([free, forward("a")]) == [0]


def test_nothing_overtakes_what_frees_memory() -> None:
    """The room that "c" was promised may be that of "b"."""
    free = FreeWork((SessionKey("b", "m", LAYERS),))
    assert choose_batch([forward("a"), free, forward("c")]) == [0]
    assert choose_batch([free, SAMPLE, forward("c")]) == [0]


def test_what_is_done_with_caches_as_wholes_runs_in_order_and_together() -> None:
    """Whose room is whose was counted in this order."""
    free, keep, reuse = FreeWork((key("a"),)), KeepWork(key("b"), 128), ReuseWork(key("c"), key("d"), 128, take=True)
    assert choose_batch([free, reuse, keep, forward("e")]) == [0, 1, 2]
    assert choose_batch([forward("e"), reuse, forward("f")]) == [0]
    assert choose_batch([reuse, KeepWork(key("d"), 128), free]) == [0]
    assert choose_batch([free, forward("e"), reuse]) == [0]


def test_tokens_are_drawn_before_anything_else_is_run() -> None:
    assert choose_batch([forward("a"), SAMPLE, forward("c", 100), SAMPLE]) == [1, 3]


def test_other_kinds_and_layers_wait_for_a_step_of_their_own() -> None:
    other = forward("b", layers=LayerRange(1, 4))
    assert choose_batch([forward("a"), other, prompt("c"), forward("d")]) == [0, 3]


def test_the_token_budget_bounds_a_step_but_never_stops_the_first_work() -> None:
    assert choose_batch([forward("a", 900), forward("b", 20)], token_budget=512) == [0]
    assert choose_batch([forward("a", 400), forward("b", 200), forward("c", 100)], token_budget=512) == [0, 2]


def test_sessions_decode_beside_one_chunk_and_wait_for_no_more() -> None:
    chunks = [forward(session, 128) for session in "abcd"]
    assert choose_batch(chunks) == [0, 1, 2, 3]
    assert choose_batch([*chunks, forward("e"), forward("f")]) == [0, 4, 5]
    small = [forward(session, 20) for session in "abcd"]
    assert choose_batch([*small, forward("e")], mixed_tokens=40) == [0, 1, 4]


def test_a_session_with_drafts_decodes() -> None:
    drafting = [forward(session, DECODED_TOKENS) for session in "abcd"]
    assert choose_batch([forward("e", 128), *drafting, forward("f", 128)]) == [0, 1, 2, 3, 4]
    assert choose_batch([forward("e"), *drafting]) == [0, 1, 2, 3, 4]


WORKS = st.lists(
    st.one_of(
        st.builds(forward, st.sampled_from("abc"), st.integers(1, 300)),
        st.builds(prompt, st.sampled_from("abc"), st.integers(1, 300)),
        st.just(SAMPLE),
        st.just(SCORE),
        st.builds(lambda s: FreeWork((key(s),)), st.sampled_from("abc")),
        st.builds(lambda s: KeepWork(key(s), 128), st.sampled_from("abc")),
        st.builds(lambda s, t: ReuseWork(key(s), key(t), 128, take=True), st.sampled_from("ab"), st.just("c")),
    ),
    max_size=20,
)


def sessions_of(work: Work) -> set[str]:
    match work:
        case ForwardWork() | PromptWork():
            return {segment.key.session for segment in work.segments}
        case FreeWork():
            return {key.session for key in work.keys}
        case KeepWork():
            return {work.key.session}
        case ReuseWork():
            return {work.source.session, work.target.session}
        case SampleWork() | ScoreWork():
            return set()


@given(WORKS)
def test_every_work_runs_once_and_each_sessions_works_in_order(queue: list[Work]) -> None:
    pending = list(enumerate(queue))
    ran: list[int] = []
    while pending:
        chosen = choose_batch([work for _, work in pending])
        assert chosen
        assert 0 in chosen or isinstance(pending[chosen[0]][1], SampleWork)
        ran += [pending[index][0] for index in chosen]
        pending = [item for index, item in enumerate(pending) if index not in set(chosen)]
    assert sorted(ran) == list(range(len(queue)))
    for session in "abc":
        own = [index for index in ran if session in sessions_of(queue[index])]
        assert own == sorted(own)
    managed = [index for index in ran if isinstance(queue[index], CacheWork)]
    assert managed == sorted(managed)
