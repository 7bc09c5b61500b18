"""The choice of a token from logits. Depends on one row and its draw alone, not on what else is in the batch."""

from __future__ import annotations

import torch

from meshnet.errors import InvalidRequest, MeshnetError
from services.node.core.work import Sampling

NOT_FINITE = "the hidden states lead to logits that are not finite"


def choose_greedy(logits: torch.Tensor) -> list[int | MeshnetError]:
    """As `choose` does greedily, for all rows of `[rows, vocab]` at once."""
    # The first of equals, as torch promises. Five times as fast as argmax where rows are not contiguous.
    largest, tokens = logits.max(dim=-1)
    finite = torch.isfinite(largest)
    return [
        token if is_finite else InvalidRequest(NOT_FINITE)
        for token, is_finite in zip(tokens.tolist(), finite.tolist(), strict=True)
    ]


def choose(logits: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """One token from `[vocab]` logits in the model's dtype. `uniform` in [0, 1) makes the draw.

    Greedy takes the largest logit, the lowest id among equals. Otherwise: divide by the temperature, keep the
    `top_k` likeliest, of these the fewest that reach `top_p` together, and walk the kept ones from the likeliest on,
    the lower id first among equals, until their share passes `uniform`. Raises InvalidRequest if no logit is finite
    or any is not a number: the hidden states were not.
    """
    largest = logits.max()
    if not torch.isfinite(largest):
        raise InvalidRequest(NOT_FINITE)
    if sampling.temperature == 0.0:
        return int(torch.nonzero(logits == largest)[0])
    # From the largest on, so that no temperature takes it beyond what a float holds.
    scaled = (logits.float() - largest.float()) / sampling.temperature
    values, ids = torch.sort(scaled, descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    # In float64, so that sums over a large vocabulary stay ordered and exact enough to draw from.
    shares = torch.softmax(values.double(), dim=-1).cumsum(dim=-1)
    kept = (
        min(int(torch.searchsorted(shares, sampling.top_p)) + 1, len(shares)) if sampling.top_p < 1.0 else len(shares)
    )
    drawn = int(torch.searchsorted(shares[:kept], uniform * float(shares[kept - 1]), right=True))
    return int(ids[min(drawn, kept - 1)])
