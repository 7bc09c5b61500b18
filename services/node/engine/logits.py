"""What becomes of logits before a token is chosen, and what they tell of tokens. One row at a time."""

from __future__ import annotations

import numpy as np
import torch

from meshnet.errors import InvalidRequest, NotFinite
from meshnet.logprobs import TokenLogprobs
from services.node.core.choices import Place
from services.node.core.work import Buffer, Sampling

NOT_FINITE = "the hidden states lead to logits that are not finite"
_BITS_OF_A_WORD, _BITS_OF_A_BYTE = 32, 8


def processed(logits: torch.Tensor, sampling: Sampling, place: Place) -> torch.Tensor:
    """`[vocab]` logits after masks, bias and penalties, in float32; as they are if there are none.

    In the order of transformers' processors, where it has them: repetition after bias. What may not be chosen has -inf.
    Raises InvalidRequest if `allowed` has not a bit for each token.
    """
    if place.is_free and not sampling.logit_bias:
        return logits
    scores = logits.to(torch.float32, copy=True)
    if place.allowed is not None:
        scores[~_bits(place.allowed, len(scores), scores.device)] = -torch.inf
    if place.barred:
        scores[[token for token in place.barred if token < len(scores)]] = -torch.inf
    if sampling.logit_bias:
        biased, values = zip(*sampling.logit_bias, strict=True)
        scores[list(biased)] += torch.tensor(values, device=scores.device)
    if place.counted:
        token_ids = _int64(place.counted.token_ids).to(scores.device)
        times = _int64(place.counted.times).to(scores.device)
        scores[token_ids] = _penalized(scores[token_ids], times, sampling)
    return scores


def token_logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Of `[vocab]` logits as the model gives them, in float32. Raises NotFinite if none is finite or any is not a
    number."""
    scores = logits.float()
    if not torch.isfinite(largest := scores.max()):
        raise NotFinite(NOT_FINITE)
    _, top = likeliest(scores, num_top)
    # From the largest on, as log_softmax does. It would make a row of all, and one or a few are asked for.
    scores = scores - largest
    ids = torch.cat([torch.tensor([token], device=scores.device), top])
    own, *others = (scores[ids] - scores.exp().sum().log()).tolist()
    return TokenLogprobs(own, tuple(zip(top.tolist(), others, strict=True)))


def likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of `[vocab]`, and their ids: from the largest on, the lower id first among equals."""
    if not count:
        return scores[:0], torch.empty(0, dtype=torch.int64, device=scores.device)
    # Which of the equals at its end it takes, topk does not promise.
    least = torch.topk(scores, min(count, len(scores)), sorted=False).values.min()
    values, ids = in_order(scores, scores >= least)
    return values[:count], ids[:count]


def in_order(scores: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `likeliest`, of those that a mask leaves."""
    ids = torch.nonzero(wanted)[:, 0]
    values, order = torch.sort(scores[ids], descending=True, stable=True)
    return values, ids[order]


def _penalized(scores: torch.Tensor, times: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Of tokens in the text, generated so many times."""
    if (factor := sampling.repetition_penalty) != 1.0:
        scores = torch.where(scores < 0, scores * factor, scores / factor)
    return scores - (sampling.presence_penalty * (times > 0) + sampling.frequency_penalty * times)


def _int64(buffer: Buffer) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(buffer, np.int64).copy())


def _bits(buffer: Buffer, count: int, device: torch.device) -> torch.Tensor:
    raw = np.frombuffer(buffer, np.uint8)
    if len(raw) != -(-count // _BITS_OF_A_WORD) * _BITS_OF_A_WORD // _BITS_OF_A_BYTE:
        raise InvalidRequest(f"a mask of {len(raw)} bytes is not one of {count} tokens")
    return torch.from_numpy(np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)).to(device)
