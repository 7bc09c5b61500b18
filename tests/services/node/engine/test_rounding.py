"""What comes out of a session is the same to the bit however its prompt is cut, and whatever runs beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from meshnet.chunks import CHUNK_TOKENS, LARGE_CHUNK_TOKENS
from meshnet.model import KvPrecision, Quantization
from services.node.core.batching import BLOCK_ROWS, DECODED_TOKENS, chunk_starts
from services.node.engine.kernels import busy_chunk_tokens
from services.node.engine.linear import make_linear
from tests.services.node.engine.models import TINY, Mesh, mesh, prompt_of, save_model, splits_of

CPU = torch.device("cpu")
# One with plain attention, one with a window, and one whose scores torch's kernels do not make.
ARCHITECTURES = ("llama", "mistral-window", "gemma2")
# Ends within a block, on one, and so soon behind one that it is no chunk of its own.
LENGTHS = (5, 40, 133, 300, 384)


@pytest.fixture(params=ARCHITECTURES)
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    files = save_model(tmp_path_factory.mktemp(request.param), TINY[request.param])
    with mesh(files, splits_of(4, 2), kv_tokens=4096) as made:
        yield made


def prefill(shards: Mesh, session: str, prompt: list[int], size: int) -> bytes:
    """In chunks; the output of the last token."""
    last = b""
    starts = chunk_starts(0, len(prompt), size)
    for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True):
        last = bytes(shards.step({session: prompt[start:end]})[session])
    return last


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_is_the_same_in_chunks_of_any_size(shards: Mesh, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    sizes = (busy_chunk_tokens(CPU), CHUNK_TOKENS, LARGE_CHUNK_TOKENS)
    outputs = {size: prefill(shards, f"in-{size}", prompt, size) for size in sizes}
    # The step behind it sees every key and value of it.
    then = {size: bytes(shards.step({f"in-{size}": [7]})[f"in-{size}"]) for size in sizes}
    assert len(set(outputs.values())) == 1
    assert len(set(then.values())) == 1
    shards.free(*(f"in-{size}" for size in sizes))


def test_tokens_are_the_same_alone_and_beside_others(shards: Mesh) -> None:
    prompt, others = prompt_of(90, 1), {f"other-{index}": prompt_of(20 + 9 * index, index) for index in range(9)}
    prefill(shards, "alone", prompt, CHUNK_TOKENS)
    prefill(shards, "beside", prompt, busy_chunk_tokens(CPU))
    for session, its_prompt in others.items():
        prefill(shards, session, its_prompt, CHUNK_TOKENS)
    for token in (3, 11, 5):
        alone = bytes(shards.step({"alone": [token]})["alone"])
        chunk_of_another = {"other-0": prompt_of(BLOCK_ROWS, token)}
        step = {"beside": [token], **{session: [token] for session in others}, **chunk_of_another}
        assert bytes(shards.step(step)["beside"]) == alone
    shards.free("alone", "beside", *others)


def test_no_chunk_is_as_short_as_what_is_decoded_but_a_prompt_itself() -> None:
    for end in range(1, 700):
        for size in (BLOCK_ROWS, CHUNK_TOKENS, LARGE_CHUNK_TOKENS):
            starts = chunk_starts(0, end, size)
            lengths = [after - start for start, after in zip(starts, [*starts[1:], end], strict=True)]
            assert sum(lengths) == end
            assert min(lengths) > DECODED_TOKENS or len(lengths) == 1
            assert not any(start % BLOCK_ROWS for start in starts)
            assert max(lengths) <= size + DECODED_TOKENS
    assert chunk_starts(0, 0, BLOCK_ROWS) == []


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (2048, 2048), (2560, 4096)])
def test_a_row_is_multiplied_the_same_in_any_company(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(count, columns, generator=generator).bfloat16() for count in (rows, 300))
    layer = make_linear(weight * 0.05, None, Quantization.BFLOAT16, CPU)
    outputs = [layer(hidden[None, :count])[0] for count in (1, 2, 5, 16, 17, 32, 129, 300)]
    assert all(output[: len(outputs[0])].equal(outputs[0]) for output in outputs)
    assert all(output[:2].equal(outputs[1]) for output in outputs[1:])


def test_keys_of_integers_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    files = save_model(tmp_path_factory.mktemp("llama"), TINY["llama"])
    with mesh(files, kv_tokens=4096, kv_precision=KvPrecision.INT8) as shards:
        prompt = prompt_of(300)
        assert prefill(shards, "a", prompt, CHUNK_TOKENS) == prefill(shards, "b", prompt, busy_chunk_tokens(CPU))
        shards.free("a", "b")
