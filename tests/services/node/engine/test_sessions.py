"""KV caches under use: packed, chunked, interleaved, cut back, and refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshnet.errors import InvalidRequest, KvFull, NotFinite, PositionMismatch, UnknownModel, WrongLayers
from meshnet.model import KvPrecision, LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import (
    ForwardWork,
    FreeWork,
    PromptWork,
    SampleWork,
    Sampling,
    Segment,
    SessionKey,
    ShardSpec,
)
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from tests.parity import Reference
from tests.services.node.engine.models import MODEL, TINY, Mesh, mesh, prompt_of, run, save_model, splits_of

ALL = LayerRange(0, 4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save_model(tmp_path_factory.mktemp("llama"), TINY["llama"])


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> Reference:
    return Reference(files.path)


# Rounded keys and values change a logit by some more of its last bits.
TOLERATED_STEPS = {KvPrecision.BFLOAT16: 2.0, KvPrecision.INT8: 6.0}


@pytest.fixture(params=list(KvPrecision))
def kv_precision(request: pytest.FixtureRequest) -> KvPrecision:
    return KvPrecision(request.param)


@pytest.fixture
def tolerated(kv_precision: KvPrecision) -> float:
    return TOLERATED_STEPS[kv_precision]


@pytest.fixture
def shards(files: ModelFiles, kv_precision: KvPrecision) -> Iterator[Mesh]:
    with mesh(files, splits_of(4, 2), kv_precision=kv_precision) as made:
        yield made


def prompt_work(session: str, position: int, ids: list[int], returned: int | None = None) -> PromptWork:
    key = SessionKey(session, MODEL, ALL)
    wanted = len(ids) if returned is None else returned
    return PromptWork(MODEL, ALL, (Segment(key, position, len(ids), wanted),), tuple(ids))


@pytest.fixture
def executor(files: ModelFiles, kv_precision: KvPrecision) -> TorchExecutor:
    made = TorchExecutor({MODEL: files})
    spec = ShardSpec(read_manifest(files), ALL, Quantization.BFLOAT16, 512, kv_precision)
    made.attach(made.load(spec, lambda done, total: None))
    return made


def test_sessions_decoded_together_are_each_right(shards: Mesh, reference: Reference, tolerated: float) -> None:
    prompts = {f"s{index}": prompt_of(5 + 7 * index, index) for index in range(6)}
    emitted = shards.generate(prompts, 10, chunk=16)
    for session, prompt in prompts.items():
        reference.check(prompt, emitted[session], tolerated)


def test_a_prompt_joins_between_the_steps_of_another(shards: Mesh, reference: Reference, tolerated: float) -> None:
    first, second = prompt_of(150, 1), prompt_of(40, 2)
    emitted = shards.generate({"a": first}, 3, chunk=128)["a"]
    rows = shards.step({"a": [emitted.pop()], "b": second[:30]}, {"a": len(first) + 2})
    emitted += shards.sample({"a": rows["a"]}).values()
    reference.check(first, emitted[:2], tolerated)
    last = shards.step({"b": second[30:]})
    reference.check(second, list(shards.sample(last).values()), tolerated)


def test_a_cut_back_session_continues_as_if_the_rest_had_never_been(shards: Mesh) -> None:
    prompt, other = prompt_of(30, 1), prompt_of(9, 5)
    shards.step({"a": prompt})
    shards.step({"a": [7]})
    again = shards.step({"a": other}, {"a": 20})
    fresh_start = shards.step({"b": prompt[:20]})
    assert fresh_start
    fresh = shards.step({"b": other})
    assert bytes(again["a"]) == bytes(fresh["b"])
    assert shards.lengths["a"] == 29


def test_a_retried_step_gives_the_same(executor: TorchExecutor) -> None:
    first = run(executor, [prompt_work("a", 0, prompt_of(20))])
    assert run(executor, [prompt_work("a", 0, prompt_of(20))]) == first
    step = run(executor, [prompt_work("a", 20, [3])])
    assert run(executor, [prompt_work("a", 20, [3])]) == step


def test_two_chunks_of_one_session_in_one_step(executor: TorchExecutor) -> None:
    ids = prompt_of(40)
    apart = run(executor, [prompt_work("a", 0, ids[:25])]) + run(executor, [prompt_work("a", 25, ids[25:])])
    together = run(executor, [prompt_work("b", 0, ids[:25]), prompt_work("b", 25, ids[25:])])
    assert [len(rows) for rows in together] == [len(rows) for rows in apart]
    run(executor, [prompt_work("b", 40, [1])])
    executor.check_integrity()


def test_prompts_past_a_cache_block_and_a_query_block(
    executor: TorchExecutor, reference: Reference, tolerated: float
) -> None:
    ids = prompt_of(510, 3)
    rows = run(executor, [prompt_work("a", 0, ids[:129], 0)])
    assert rows[0].nbytes == 0
    (last,) = run(executor, [prompt_work("a", 129, ids[129:], 1)])
    (choice,) = run(executor, [SampleWork(MODEL, last, Sampling(), 0.0)])
    reference.check(ids, [choice.token_id], tolerated)


def test_only_the_wanted_rows_come_back_in_the_order_of_segments(executor: TorchExecutor) -> None:
    ids = prompt_of(12)
    keys = [SessionKey(name, MODEL, ALL) for name in "ab"]
    whole = run(executor, [prompt_work("c", 0, ids[:8]), prompt_work("d", 0, ids[8:])])
    segments = (Segment(keys[0], 0, 8, 2), Segment(keys[1], 0, 4, 1))
    (rows,) = run(executor, [PromptWork(MODEL, ALL, segments, tuple(ids))])
    row = 64 * 2
    assert bytes(rows) == bytes(whole[0])[-2 * row :] + bytes(whole[1])[-row:]


def test_a_refused_work_does_not_harm_the_others(executor: TorchExecutor) -> None:
    ids = prompt_of(6)
    alone = run(executor, [prompt_work("a", 0, ids), prompt_work("b", 0, ids)])
    good, ahead, word, late, fine = executor.run(
        [
            prompt_work("c", 0, ids),
            prompt_work("a", 7, ids),
            prompt_work("d", 0, [10**9]),
            prompt_work("e", 300, [1]),
            prompt_work("f", 0, ids),
        ]
    )
    assert [good, fine] == alone
    assert isinstance(ahead, PositionMismatch)
    assert ahead.cached_length == 6
    assert isinstance(word, InvalidRequest)
    assert isinstance(late, PositionMismatch)
    assert late.cached_length == 0
    executor.check_integrity()


def test_hidden_states_that_are_not_numbers_harm_only_their_own_session(executor: TorchExecutor) -> None:
    good = SampleWork(MODEL, bytes(range(64)) * 2, Sampling(), 0.5)
    (alone,) = run(executor, [good])
    bad = SampleWork(MODEL, b"\xff\xff" * 64, Sampling(), 0.5)
    first, second, third = executor.run([good, bad, good])
    assert [first, third] == [alone, alone]
    assert isinstance(second, NotFinite)
    key = SessionKey("nan", MODEL, ALL)
    broken = ForwardWork(MODEL, ALL, (Segment(key, 0, 1, 1),), b"\xff\xff" * 64)
    fine = ForwardWork(MODEL, ALL, (Segment(SessionKey("b", MODEL, ALL), 0, 1, 1),), good.hidden)
    (wanted,) = run(executor, [fine])
    refused, beside = executor.run([broken, fine])
    assert isinstance(refused, NotFinite)
    assert beside == wanted


def test_the_context_ends(executor: TorchExecutor) -> None:
    run(executor, [prompt_work("a", 0, prompt_of(512), 0)])
    (over,) = executor.run([prompt_work("a", 512, [1])])
    assert isinstance(over, InvalidRequest)


@pytest.mark.parametrize(
    "work",
    [
        PromptWork(MODEL, ALL, (), ()),
        PromptWork(MODEL, ALL, (Segment(SessionKey("x", MODEL, ALL), 0, 2, 1),), (1,)),
        PromptWork(MODEL, ALL, (Segment(SessionKey("x", MODEL, ALL), -1, 1, 1),), (1,)),
        PromptWork(MODEL, ALL, (Segment(SessionKey("x", MODEL, ALL), 0, 1, 2),), (1,)),
        PromptWork(MODEL, ALL, (Segment(SessionKey("x", MODEL, LayerRange(0, 2)), 0, 1, 1),), (1,)),
        ForwardWork(MODEL, ALL, (Segment(SessionKey("x", MODEL, ALL), 0, 1, 1),), b"\0" * 127),
        SampleWork(MODEL, b"\0" * 126, Sampling(), 0.0),
    ],
)
def test_impossible_works_are_refused(executor: TorchExecutor, work: PromptWork | ForwardWork | SampleWork) -> None:
    (result,) = executor.run([work])
    assert isinstance(result, InvalidRequest), result


def test_freed_sessions_take_no_memory_and_unknown_ones_are_no_error(
    executor: TorchExecutor, kv_precision: KvPrecision
) -> None:
    run(executor, [prompt_work("a", 0, prompt_of(130)), prompt_work("b", 0, [1])])
    # K and V, 4 layers, 2 heads of 16 values, for the 512 tokens that were promised: used or not.
    head_bytes = {KvPrecision.BFLOAT16: 16 * 2, KvPrecision.INT8: 16 + 2}[kv_precision]
    assert executor.kv_bytes == 2 * 4 * 2 * head_bytes * 512
    assert executor.num_kv_blocks == 4 * (2 + 1)
    keys = tuple(SessionKey(name, MODEL, ALL) for name in ("a", "b", "never"))
    assert run(executor, [FreeWork(keys), FreeWork(keys)]) == [None, None]
    assert executor.num_kv_blocks == 0
    (gone,) = executor.run([prompt_work("a", 130, [1])])
    assert isinstance(gone, PositionMismatch)


def test_a_work_without_room_is_refused_alone_and_runs_when_there_is_some(executor: TorchExecutor) -> None:
    """512 tokens are promised: four blocks."""
    ids = prompt_of(300)
    run(executor, [prompt_work("a", 0, ids, 0)])
    refused, (fine,) = executor.run([prompt_work("b", 0, ids, 0)]), run(executor, [prompt_work("c", 0, [1])])
    assert isinstance(refused[0], KvFull)
    both = executor.run([prompt_work("d", 0, [1]), prompt_work("c", 1, [1])])
    assert isinstance(both[0], KvFull)
    assert not isinstance(both[1], Exception)
    executor.check_integrity()
    run(executor, [FreeWork((SessionKey("a", MODEL, ALL),))])
    run(executor, [prompt_work("b", 0, ids, 0)])
    assert run(executor, [prompt_work("c", 0, [1])]) == [fine]


def test_sessions_that_move_in_memory_are_none_the_wiser(
    executor: TorchExecutor, reference: Reference, tolerated: float
) -> None:
    """Four grow to a block each, then one is freed and another takes its room, between sessions or beyond them."""
    prompts = {name: prompt_of(100, seed) for seed, name in enumerate("abc")}
    for name, ids in prompts.items():
        run(executor, [prompt_work(name, 0, ids, 0)])
    for freed, grows in (("a", "b"), ("c", "b")):
        run(executor, [FreeWork((SessionKey(freed, MODEL, ALL),))])
        more = prompts[grows] + prompt_of(128, 7)
        (row,) = run(executor, [prompt_work(grows, len(prompts[grows]), more[len(prompts[grows]) :], 1)])
        prompts[grows] = more
        (choice,) = run(executor, [SampleWork(MODEL, row, Sampling(), 0.0)])
        reference.check(more, [choice.token_id], tolerated)
        executor.check_integrity()


def test_what_is_not_held_is_refused(files: ModelFiles) -> None:
    executor = TorchExecutor({MODEL: files})
    (unknown,) = executor.run([prompt_work("a", 0, [1])])
    assert isinstance(unknown, UnknownModel)
    spec = ShardSpec(read_manifest(files), LayerRange(1, 3), Quantization.BFLOAT16, 512)
    executor.attach(executor.load(spec, lambda done, total: None))
    (wrong,) = executor.run([prompt_work("a", 0, [1])])
    assert isinstance(wrong, WrongLayers)
    (headless,) = executor.run([SampleWork(MODEL, b"\0" * 128, Sampling(), 0.0)])
    assert isinstance(headless, WrongLayers)


def test_layers_come_and_go_in_pieces(files: ModelFiles, executor: TorchExecutor, kv_precision: KvPrecision) -> None:
    """Any contiguous part of what is held runs, wherever it was split when it was loaded."""
    manifest = read_manifest(files)
    (wanted,) = run(executor, [prompt_work("a", 0, prompt_of(5))])
    pieces = TorchExecutor({MODEL: files})
    for layers in (LayerRange(2, 4), LayerRange(0, 2)):
        spec = ShardSpec(manifest, layers, Quantization.BFLOAT16, 512, kv_precision)
        pieces.attach(pieces.load(spec, lambda done, total: None))
    assert run(pieces, [prompt_work("a", 0, prompt_of(5))]) == [wanted]
    part = LayerRange(1, 3)
    key = SessionKey("p", MODEL, part)
    work = ForwardWork(MODEL, part, (Segment(key, 0, 1, 1),), bytearray(128))
    before = run(pieces, [work])
    pieces.detach(MODEL, LayerRange(3, 4))
    assert run(pieces, [ForwardWork(MODEL, part, (Segment(key, 1, 1, 1),), bytes(128))]) != [None]
    assert run(pieces, [work]) == before
    (wrong,) = pieces.run([prompt_work("a", 5, [1])])
    assert isinstance(wrong, WrongLayers)
    pieces.detach(MODEL, LayerRange(1, 2))
    assert pieces.num_kv_blocks == 0
    pieces.check_integrity()
    (wrong,) = pieces.run([work])
    assert isinstance(wrong, WrongLayers)


def test_a_step_that_fails_inside_is_the_answer_to_all_and_harms_no_cache(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = run(executor, [prompt_work("a", 0, prompt_of(9))])
    with monkeypatch.context() as patch:
        for kernel in ("attend_loop", "scaled_dot_product_attention", "_attend_to_integers"):
            patch.setattr(f"services.node.engine.attention.{kernel}", _out_of_memory)
        results = executor.run([prompt_work("a", 9, [1]), prompt_work("b", 0, [1])])
    assert all(isinstance(result, MemoryError) for result in results)
    executor.check_integrity()
    assert run(executor, [prompt_work("a", 0, prompt_of(9))]) == [first]
    run(executor, [prompt_work("a", 9, [1])])


def _out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError
