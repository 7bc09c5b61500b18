"""The choice of a token from logits. Depends on one row and its draw alone, not on what else is in the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from meshnet.errors import InvalidRequest, MeshnetError, NotFinite
from services.node.core.choices import ANYWHERE, Choice, Place
from services.node.core.work import Sampling
from services.node.engine.logits import NOT_FINITE, in_order, likeliest, processed

NONE_LEFT = "no token that may be chosen has a logit that is finite"
# Tokens so much less likely than the likeliest (e^-10) are seldom drawn: they are sorted only when one is.
_SORTED_FIRST = -10.0


def choose_greedy(largest: torch.Tensor, tokens: torch.Tensor) -> list[Choice | MeshnetError]:
    """As `choose` does greedily, for rows of which the largest logits `[rows]` and their tokens are known."""
    finite = torch.isfinite(largest)
    return [
        Choice(token) if is_finite else NotFinite(NOT_FINITE)
        for token, is_finite in zip(tokens.tolist(), finite.tolist(), strict=True)
    ]


def choose(logits: torch.Tensor, sampling: Sampling, uniform: float, place: Place = ANYWHERE) -> int:
    """One token from `[vocab]` logits in the model's dtype. `uniform` in [0, 1) makes the draw.

    Greedy takes the largest of the logits that masks, bias and penalties leave, the lowest id among equals. Otherwise:
    divide by the temperature, keep the `top_k` likeliest, of these the fewest that reach `top_p` together, of these
    those that are `min_p` times as likely as the likeliest, and walk the kept ones from the likeliest on, the lower id
    first among equals, until their share passes `uniform`. Raises NotFinite if no logit is finite or any is not a
    number, InvalidRequest if no token is left.
    """
    scores, largest = _scores(logits, sampling, place)
    if sampling.temperature == 0.0:
        return int(torch.nonzero(scores == largest)[0])
    scaled = _scaled(scores, largest, sampling)
    drawn = _keep(scaled, sampling, _SORTED_FIRST).draw(uniform)
    if drawn is None:
        drawn = _keep(scaled, sampling).draw(uniform)
    assert drawn is not None, "of all tokens none is left out"
    return drawn


def distribution(
    logits: torch.Tensor, sampling: Sampling, place: Place = ANYWHERE
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `choose` draws from at a temperature over 0: the ids that are kept, as they are walked, and their
    probabilities in float64."""
    kept = _keep(_scaled(*_scores(logits, sampling, place), sampling), sampling)
    return kept.ids, kept.sums.diff(prepend=kept.sums.new_zeros(1)) / kept.total


@dataclass(frozen=True, slots=True)
class _Kept:
    """Tokens that may be drawn, from the likeliest on. `sums`: the running sums of their weights, in float64, so that
    they stay ordered over a large vocabulary. `total`: that of all that may be drawn, of which the least likely are
    left out unless it `is_whole`."""

    ids: torch.Tensor
    sums: torch.Tensor
    total: float
    is_whole: bool

    def draw(self, uniform: float) -> int | None:
        """None: it is one of those left out."""
        drawn = int(torch.searchsorted(self.sums, uniform * self.total, right=True))
        if drawn == len(self.ids):
            if not self.is_whole:
                return None
            # Rounded up to the total: the last one that has any weight.
            drawn = int(torch.searchsorted(self.sums, self.total))
        return int(self.ids[drawn])


def _scores(logits: torch.Tensor, sampling: Sampling, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """What logits have become, and the largest of them."""
    if not torch.isfinite(largest := logits.max()):
        raise NotFinite(NOT_FINITE)
    scores = processed(logits, sampling, place)
    if scores is not logits and not torch.isfinite(largest := scores.max()):
        raise InvalidRequest(NONE_LEFT)
    return scores, largest


def _scaled(scores: torch.Tensor, largest: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """From the largest on, so that no temperature takes it beyond what a float holds."""
    return (scores.float() - largest.float()) / sampling.temperature


def _keep(scaled: torch.Tensor, sampling: Sampling, sorted_from: float = -math.inf) -> _Kept:
    """What may be drawn. Of all tokens only those are sorted that are over `sorted_from`, if that is enough."""
    # What is not possible at all, as masks leave it, is not kept in any case.
    least = math.log(sampling.min_p) if sampling.min_p else torch.finfo(scaled.dtype).min
    if sampling.top_k:
        values, ids = likeliest(scaled, sampling.top_k)
    else:
        values, ids = in_order(scaled, scaled > sorted_from)
    sums = values.double().exp().cumsum(0)
    total = float(sums[-1] if sampling.top_k else scaled.double().exp().sum())
    reached = int(torch.searchsorted(sums, sampling.top_p * total)) + 1 if sampling.top_p < 1.0 else len(ids) + 1
    is_whole = bool(sampling.top_k) or sorted_from <= least or reached <= len(ids)
    if not is_whole and sampling.top_p < 1.0:
        return _keep(scaled, sampling)
    num_kept = min(reached, int((values >= least).sum()))
    return _Kept(ids[:num_kept], sums[:num_kept], float(sums[num_kept - 1]) if is_whole else total, is_whole)
