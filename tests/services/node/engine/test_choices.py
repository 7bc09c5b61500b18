"""Choices and scores through an executor: each work's own, whatever is in the batch, on each kind of device."""

from __future__ import annotations

import itertools
import math
from array import array
from pathlib import Path

import pytest
import torch

from meshnet.errors import InvalidRequest, MeshnetError, UnknownModel
from meshnet.logprobs import TokenLogprobs
from meshnet.model import Quantization
from meshnet.model_files import ModelFiles
from services.node.core.choices import Choice, Place
from services.node.core.history import TokenCounts
from services.node.core.work import SampleWork, Sampling, ScoreWork
from services.node.engine.executor import TorchExecutor
from tests.services.node.engine.comparison import DEVICES
from tests.services.node.engine.models import MODEL, TINY, VOCAB, mesh, prompt_of, run, save_model

COUNTED = TokenCounts((1, 2, 3), (4, 4, 5)).counted()
ODD = array("I", [0xAAAAAAAA] * -(-VOCAB // 32)).tobytes()
SAMPLINGS = (
    Sampling(),
    Sampling(1.0),
    Sampling(0.7, 20, 0.9),
    Sampling(1.2, min_p=0.02, presence_penalty=1.0, repetition_penalty=1.3),
    Sampling(logit_bias=((7, 100.0),)),
    Sampling(frequency_penalty=2.0),
)
PLACES = (Place(COUNTED), Place(COUNTED, barred=(7, 8)), Place(COUNTED, allowed=ODD))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    path: Path = tmp_path_factory.mktemp("llama")
    return save_model(path, TINY["llama"])


@pytest.mark.parametrize("quantization", [Quantization.BFLOAT16, Quantization.FLOAT32])
@pytest.mark.parametrize("device", DEVICES)
def test_a_choice_is_the_same_alone_and_among_others(
    files: ModelFiles, device: str, quantization: Quantization
) -> None:
    with mesh(files, quantization=quantization, device=device) as shards:
        executor = shards.shards[0][0]
        rows = shards.rows({"a": prompt_of(18)})["a"]
        size = rows.nbytes // 18
        works = [
            SampleWork(MODEL, rows[index * size : (index + 1) * size], sampling, index / 18, place, index % 3 or None)
            for index, (sampling, place) in enumerate(itertools.product(SAMPLINGS, PLACES))
        ]
        together: list[Choice] = run(executor, works)
        logits = shards.logits(rows).float().cpu()
    for index, (work, choice) in enumerate(zip(works, together, strict=True)):
        assert work.place.allowed is None or choice.token_id % 2 == 1
        assert choice.token_id not in work.place.barred
        assert work.sampling.logit_bias != ((7, 100.0),) or work.place.barred or choice.token_id == 7
        assert (choice.logprobs is None) == (work.top_logprobs is None)
        if choice.logprobs:
            expected = float(logits[index].log_softmax(-1)[choice.token_id])
            assert choice.logprobs.logprob == pytest.approx(expected, abs=1e-4)
            assert len(choice.logprobs.top) == work.top_logprobs
    with mesh(files, quantization=quantization, device=device) as shards:
        executor = shards.shards[0][0]
        # As many rows, so that the head has the same bits, and the others want something else.
        for index, work in enumerate(works):
            others = [SampleWork(MODEL, one.hidden, Sampling(), 0.0) for one in works]
            others[index] = work
            assert run(executor, others)[index] == together[index]


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_are_known_are_scored(files: ModelFiles, device: str) -> None:
    with mesh(files, device=device) as shards:
        executor = shards.shards[0][0]
        rows = shards.rows({"a": prompt_of(16)})["a"]
        targets = tuple(prompt_of(16, seed=1))
        first: tuple[TokenLogprobs, ...]
        first, second = run(executor, [ScoreWork(MODEL, rows, targets, 4), ScoreWork(MODEL, rows, targets, 0)])
        expected = shards.logits(rows).float().log_softmax(-1).cpu()
    assert [one.logprob for one in first] == pytest.approx(expected[torch.arange(16), list(targets)].tolist(), abs=1e-4)
    for row, one in enumerate(first):
        assert [value for _, value in one.top] == pytest.approx(expected[row].topk(4).values.tolist(), abs=1e-4)
    assert second == tuple(TokenLogprobs(one.logprob) for one in first)


def test_what_cannot_be_scored_harms_nothing_else(files: ModelFiles) -> None:
    with mesh(files) as shards:
        executor = shards.shards[0][0]
        row = shards.step({"a": prompt_of(5)})["a"]
        good = ScoreWork(MODEL, row, (3,), 1)
        results = executor.run([good, ScoreWork(MODEL, b"\xff\xff" * 64, (3,), 1), ScoreWork(MODEL, b"\0", (3,), 1)])
        assert results[0] == run(executor, [good])[0]
        assert isinstance(results[1], InvalidRequest)
        assert isinstance(results[2], MeshnetError)
        samples = [SampleWork(MODEL, row, sampling, 0.5) for sampling in (Sampling(), Sampling(1.0))]
        nothing = SampleWork(MODEL, row, Sampling(), 0.5, Place(allowed=bytes(len(ODD))))
        assert isinstance(executor.run([*samples, nothing])[2], InvalidRequest)
        assert all(isinstance(result, Choice) for result in executor.run([*samples, nothing])[:2])
        assert isinstance(TorchExecutor({}).run([good])[0], UnknownModel)
        assert math.isfinite(run(executor, [good])[0][0].logprob)
