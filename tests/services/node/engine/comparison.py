"""Shards beside transformers at the same precision, on any device.

What is compared are the logits of a text, teacher-forced: a prompt in chunks, then token by token, each step on the KV
caches of those before it, here as there. Two things are known of each precision:

- `served`: what transformers computes, with bitsandbytes at int8 and nf4;
- `exact`: float32 with the very weights that are held at that precision, each as the float32 that it stands for.

At bfloat16 and nf4 the two differ by rounding alone, and shards must be near both. At int8 transformers multiplies in
int8 (LLM.int8), which rounds the activations too and is several times as far from `exact`. A shard may do the same, or
keep its activations in bfloat16. So it must be near one of the two, and never much further from `exact` than
transformers is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from meshnet.model import LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.engine.shard import TorchShard
from services.node.files.manifest import read_manifest
from tests.oracle import QUANTIZED, relative_rms, unsharded_and_exact
from tests.parity import TOLERATED_STEPS, ParityReport, Reference, bfloat16_step
from tests.services.node.engine.models import Mesh, load, mesh_of
from tests.services.node.engine.rounded import round_what_transformers_leaves

CUDA = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
)
DEVICES: list[Any] = ["cpu", pytest.param("cuda", marks=CUDA)]
PARTS = 3

# Of the spread of the logits, in the mean square: see docs/precision.md for what was measured.
LOGITS_TOLERANCE = {
    Quantization.FLOAT32: 0.01,
    Quantization.BFLOAT16: 0.03,
    Quantization.INT8: 0.03,
    Quantization.NF4: 0.03,
}
# How far two are apart that are as far from exact each, in random directions, and a little.
APART = 1.5
# What LLM.int8 rounds in small random models.
INT8_NOISE = 0.03
# How much further from exact a shard may be than transformers is: by a share, and by what a bfloat16 boundary rounds.
NOISE_SHARE, BOUNDARY_NOISE = 1.25, 0.01


@dataclass(frozen=True, slots=True)
class Case:
    """A text of `steps` through a model, and the model's layers loaded in PARTS shards. `noise` is how far transformers
    is from exact."""

    files: ModelFiles
    quantization: Quantization
    device: str
    steps: tuple[tuple[int, ...], ...]
    served: Reference
    served_logits: torch.Tensor
    exact: Reference
    exact_logits: torch.Tensor
    noise: float
    shards: tuple[TorchShard, ...]

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step]

    @contextmanager
    def mesh(self, ways: int) -> Iterator[Mesh]:
        """On so many nodes; the last one has all shards that are left."""
        nodes = [[shard] for shard in self.shards[: ways - 1]] + [list(self.shards[ways - 1 :])]
        with mesh_of(self.files, nodes, self.device) as shards:
            yield shards

    def logits(self, shards: Mesh) -> torch.Tensor:
        """`[tokens, vocab]` of the text, on the device."""
        rows = [shards.logits(shards.rows({"text": step})["text"]) for step in self.steps]
        shards.free("text")
        return torch.cat(rows)

    def check(
        self, logits: torch.Tensor, prompt: Sequence[int], emitted: Sequence[int], *, real_size: bool = True
    ) -> ParityReport:
        """Asserts that the text's logits are near enough, and emitted tokens right by the rule of tests.parity.

        Of small random models some amplify what is rounded: two that round differently are further apart then.
        """
        served, exact = (relative_rms(logits, wanted) for wanted in (self.served_logits, self.exact_logits))
        seen = f"{served:.4f} from transformers, {exact:.4f} from exact; transformers is {self.noise:.4f} from exact"
        is_exact = self.quantization is Quantization.INT8 and exact < served
        # What transformers leaves whole it does not multiply in int8 either, and a node may.
        noise = self.noise if real_size or self.quantization is not Quantization.INT8 else max(self.noise, INT8_NOISE)
        apart = LOGITS_TOLERANCE[self.quantization] if real_size else APART * noise + BOUNDARY_NOISE
        assert (exact if is_exact else served) < apart, seen
        assert exact < NOISE_SHARE * noise + BOUNDARY_NOISE, seen
        reference = self.exact if is_exact else self.served
        steps = TOLERATED_STEPS if real_size else max(TOLERATED_STEPS, self._steps_of(noise))
        return reference.check(prompt, emitted, steps)

    def _steps_of(self, noise: float) -> float:
        """Three times a noise, in bfloat16 steps of the largest logits."""
        largest = float(self.exact_logits.max(-1).values.mean())
        return 3 * noise * float(self.exact_logits.std()) / bfloat16_step(largest)


def make_case(
    files: ModelFiles,
    float32: Reference,
    quantization: Quantization,
    device: str,
    steps: Sequence[Sequence[int]],
) -> Case:
    """`float32` is the model of the files, unsharded; it stays as it is."""
    by_transformers, by_float32 = unsharded_and_exact(float32, quantization, device)
    if quantization in QUANTIZED:
        round_what_transformers_leaves(by_float32.model, quantization)
        round_what_transformers_leaves(by_transformers.model, quantization)
    served_logits, exact_logits = by_transformers.logits_in_steps(steps), by_float32.logits_in_steps(steps)
    return Case(
        files=files,
        quantization=quantization,
        device=device,
        steps=tuple(map(tuple, steps)),
        served=by_transformers,
        served_logits=served_logits,
        exact=by_float32,
        exact_logits=exact_logits,
        noise=relative_rms(served_logits, exact_logits),
        shards=tuple(load(files, layers, quantization, device) for layers in thirds(read_manifest(files).num_layers)),
    )


def thirds(num_layers: int) -> list[LayerRange]:
    bounds = [num_layers * part // PARTS for part in range(PARTS + 1)]
    return [LayerRange(start, end) for start, end in pairwise(bounds)]


def in_steps(tokens: Sequence[int], *chunks: int) -> list[list[int]]:
    """Chunks of these lengths, then token by token."""
    ends = [sum(chunks[:index]) for index in range(len(chunks) + 1)]
    steps = [list(tokens[start:end]) for start, end in pairwise(ends)]
    return steps + [[token] for token in tokens[ends[-1] :]]
