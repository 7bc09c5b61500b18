"""What goes into a plan and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.directive import DirectiveKind
from meshnet.model import KvPrecision, LayerRange, Quantization

# Activations of a few 128-token chunks of a wide model, and the allocator's slack.
WORKSPACE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Policy:
    """Constants that a plan follows.

    `workspace_bytes` is kept free on every node, or what it measured if that is more. `adjacent_slack`: a node may
    extend its own range if the slowest stage grows by no more than this factor. `few_pieces`: a gap that would be cut
    into more takes the place of replicas that are held three times, where that makes fewer.

    A redundant piece has at least `num_layers // min_piece_divisor` layers, or half of what the whole node could hold.
    Replicas are counted up to `enough_replicas`; from there on the slowest stage is strengthened.

    Layers with fewer than `swap_below` replicas take the place of others that have more than `swap_ratio` times as
    many. `max_swaps` and `max_redundant` bound such moves and new redundant replicas in one plan, so that plans stay
    quick.
    """

    workspace_bytes: int = WORKSPACE_BYTES
    adjacent_slack: float = 1.25
    few_pieces: int = 2
    min_piece_divisor: int = 8
    enough_replicas: int = 3
    swap_below: int = 2
    swap_ratio: float = 2.0
    max_swaps: int = 8
    max_redundant: int = 64


@dataclass(frozen=True, slots=True)
class Draft:
    """A directive that has no id yet."""

    node_id: str
    kind: DirectiveKind
    model_id: str
    layers: LayerRange
    quantization: Quantization
    reason: str
    revision: str = ""
    kv_tokens: int = 0
    kv_precision: KvPrecision = KvPrecision.BFLOAT16


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Layers of a deployed model that fit nowhere. `missing_bytes` is what they need, weights and KV cache."""

    model_id: str
    layers: LayerRange
    missing_bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Directives in the order in which each node must run its own, and what could not be placed.

    `unfinished`: there is more to do, but not in one plan.
    """

    drafts: tuple[Draft, ...] = ()
    shortfalls: tuple[Shortfall, ...] = ()
    unfinished: bool = False

    def shortfall(self, model_id: str) -> str:
        """What is missing of a model, for people; empty if nothing is."""
        return "; ".join(s.text for s in self.shortfalls if s.model_id == model_id)
