"""What the layers of a model cost, as running sums: any range costs one subtraction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from meshnet.model import LayerRange, Quantization
from meshnet.topology import DeployedModel, Node

NANOSECONDS = 1_000_000_000
# Weights that a node is taken to read in a second until it has measured its speed. Only its ratio to others matters.
NOMINAL_BYTES_PER_SECOND = 10_000_000_000


def layer_bytes(model: DeployedModel, layer: int, quantization: Quantization) -> int:
    """Weights and KV cache of one layer; layer 0 also pays for the entry weights."""
    layers = LayerRange(layer, layer + 1)
    return model.manifest.shard_bytes(layers, quantization, model.kv_tokens, model.kv_precision)


class Costs:
    """One deployed model. All sums are prefix sums: `sums[end] - sums[start]` is of layers `[start, end)`."""

    def __init__(self, model: DeployedModel) -> None:
        self.model = model
        self.model_id = model.model_id
        self.num_layers = model.manifest.num_layers
        self._sizes: dict[Quantization, Sequence[int]] = {}
        self._weights: dict[Quantization, Sequence[int]] = {}
        self._work: dict[Quantization, Sequence[int]] = {}
        self._from_smallest: dict[Quantization, Sequence[int]] = {}
        self._smallest: dict[int, int] = {}

    def workspace(self, quantizations: Iterable[Quantization]) -> int:
        """Bytes that steps are predicted to take at most on a node that may store weights so."""
        manifest, tokens = self.model.manifest, self.model.kv_tokens
        return max(manifest.workspace_bytes(quantization, tokens) for quantization in quantizations)

    def sizes(self, quantization: Quantization) -> Sequence[int]:
        """Bytes of memory: weights and KV cache, the entry weights with layer 0."""
        if quantization not in self._sizes:
            layers = range(self.num_layers)
            self._sizes[quantization] = _sums([layer_bytes(self.model, layer, quantization) for layer in layers])
        return self._sizes[quantization]

    def weights(self, quantization: Quantization) -> Sequence[int]:
        """Bytes that a node reads to load layers."""
        if quantization not in self._weights:
            manifest = self.model.manifest
            entry = [manifest.entry.at(quantization), *[0] * (self.num_layers - 1)]
            self._weights[quantization] = _sums(
                [layer.at(quantization) + extra for layer, extra in zip(manifest.layers, entry, strict=True)]
            )
        return self._weights[quantization]

    def work(self, quantization: Quantization) -> Sequence[int]:
        """Bytes of weights that a decode step reads, the LM head with layer 0: what the time of a stage goes by."""
        if quantization not in self._work:
            manifest = self.model.manifest
            head = min(manifest.entry.at(quantization), 2 * manifest.hidden_size * manifest.vocab_size)
            layers = [layer.at(quantization) for layer in manifest.layers]
            self._work[quantization] = _sums([layers[0] + head, *layers[1:]])
        return self._work[quantization]

    def smallest(self, num_layers: int) -> int:
        """Bytes of memory below which no shard of so many layers can be, at any quantization."""
        if num_layers not in self._smallest:
            sizes = (self._ascending(quantization) for quantization in Quantization)
            self._smallest[num_layers] = min(of_layers[num_layers - 1] for of_layers in sizes)
        return self._smallest[num_layers]

    def most_layers(self, room: int, quantization: Quantization) -> int:
        """No node with so much room can hold more layers."""
        return bisect_right(self._ascending(quantization), room)

    def _ascending(self, quantization: Quantization) -> Sequence[int]:
        """Running sums of the layers' memory, from the smallest on."""
        if quantization not in self._from_smallest:
            sizes = sorted(after - before for before, after in pairwise(self.sizes(quantization)))
            self._from_smallest[quantization] = tuple(accumulate(sizes))
        return self._from_smallest[quantization]

    def of(self, layers: LayerRange, quantization: Quantization) -> int:
        """Bytes of memory."""
        sizes = self.sizes(quantization)
        return sizes[layers.end] - sizes[layers.start]

    def moved(self, layers: LayerRange, quantization: Quantization) -> int:
        """Bytes that loading the layers reads."""
        weights = self.weights(quantization)
        return weights[layers.end] - weights[layers.start]

    def bytes_per_second(self, node: Node, quantization: Quantization) -> int:
        """Weights that the node reads in a second of decoding, from what it measured of this model if it did."""
        measured = [s for s in node.speeds if s.model_id == self.model_id]
        best = next((s for s in measured if s.quantization is quantization), measured[0] if measured else None)
        if best is None:
            return NOMINAL_BYTES_PER_SECOND
        weights = self.weights(best.quantization)
        of_layers = weights[-1] - self.model.manifest.entry.at(best.quantization)
        return max(1, int(best.decode_tokens_per_second * of_layers / self.num_layers))


def _sums(values: Sequence[int]) -> Sequence[int]:
    return tuple(accumulate(values, initial=0))
