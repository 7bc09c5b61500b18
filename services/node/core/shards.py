"""Which layers this node serves: a pure table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshnet.errors import InvalidRequest, UnknownModel, WrongLayers
from meshnet.model import LayerRange, ModelManifest, Quantization, merge_layers
from meshnet.topology import Shard, ShardState
from services.node.core.work import ShardSpec


class ShardTable:
    """Shards that are served, and the ones that are loading. Ranges may be dropped in parts."""

    def __init__(self) -> None:
        self._ready: dict[str, dict[int, ShardSpec]] = {}
        self._loading: dict[tuple[str, LayerRange], Shard] = {}
        self._workspace_bytes: dict[str, int] = {}

    def set_loading(self, spec: ShardSpec, bytes_done: int, bytes_total: int) -> None:
        model_id = spec.manifest.model_id
        self._loading[model_id, spec.layers] = Shard(
            model_id,
            spec.layers,
            spec.quantization,
            ShardState.LOADING,
            bytes_done,
            bytes_total,
            spec.manifest.revision,
        )

    def loading_ended(self, spec: ShardSpec) -> None:
        self._loading.pop((spec.manifest.model_id, spec.layers), None)

    def add(self, spec: ShardSpec, workspace_bytes: int | None = None) -> None:
        """The shard is served from now on. `workspace_bytes`: what its steps take, where that has been measured."""
        model_id = spec.manifest.model_id
        self._ready.setdefault(model_id, {}).update((layer, spec) for layer in spec.layers.layers)
        if workspace_bytes is not None:
            self._workspace_bytes[model_id] = max(workspace_bytes, self._workspace_bytes.get(model_id, 0))

    def remove(self, model_id: str, layers: LayerRange) -> None:
        """The layers are no longer served. Layers that were not are no error."""
        held = self._ready.get(model_id, {})
        for layer in layers.layers:
            held.pop(layer, None)
        if not held:
            self._ready.pop(model_id, None)
            self._workspace_bytes.pop(model_id, None)

    def layers(self, model_id: str) -> frozenset[int]:
        """Layers served now."""
        return frozenset(self._ready.get(model_id, ()))

    def models(self) -> tuple[str, ...]:
        return tuple(sorted(self._ready))

    def held_bytes(self) -> int:
        """Weights and promised KV cache of all layers that are served."""
        return sum(
            replace(spec, layers=LayerRange(layer, layer + 1)).shard_bytes
            for held in self._ready.values()
            for layer, spec in held.items()
        )

    def workspace_bytes(self) -> int | None:
        """What the largest step takes beside weights and KV caches. None: not measured yet. One step runs at a time."""
        return max(self._workspace_bytes.values(), default=None)

    def quantization(self, model_id: str, layers: LayerRange) -> Quantization | None:
        """Of layers that are served; None if they have several, or some are not served."""
        held = self._ready.get(model_id, {})
        found = {held[layer].quantization if layer in held else None for layer in layers.layers}
        return found.pop() if len(found) == 1 else None

    def manifest(self, model_id: str) -> ModelManifest:
        """Of a model with layers here. Raises UnknownModel."""
        try:
            return next(iter(self._ready[model_id].values())).manifest
        except KeyError:
            held = ", ".join(self.models()) or "none"
            raise UnknownModel(f"no layers of model {model_id!r} are served here; models served here: {held}") from None

    def resolve(self, model_id: str | None, layers: LayerRange | None) -> tuple[str, LayerRange]:
        """What a frame means by the model and layers that it names or leaves out.

        Raises UnknownModel, WrongLayers if they are not served here, InvalidRequest if leaving out is ambiguous.
        """
        if model_id is None:
            if len(self._ready) > 1:
                raise InvalidRequest(f"several models are served here ({', '.join(self.models())}): name one")
            model_id = next(iter(self._ready), "")
        self.manifest(model_id)
        held = merge_layers(self.layers(model_id))
        if layers is None:
            if len(held) > 1:
                raise InvalidRequest(f"layers {_listed(held)} of {model_id!r} are served here: name the ones to run")
            return model_id, held[0]
        if not any(layers in run for run in held):
            raise WrongLayers(f"layers {layers} of {model_id!r} are not all served here; served: {_listed(held)}")
        return model_id, layers

    def listing(self) -> tuple[Shard, ...]:
        """The shards as the tracker wants them: ready ones as the fewest ranges, then the loading ones."""
        ready = [shard for _, held in sorted(self._ready.items()) for shard in _ready_shards(held)]
        return (*ready, *(replace(shard) for _, shard in sorted(self._loading.items())))


def _ready_shards(held: Mapping[int, ShardSpec]) -> Iterator[Shard]:
    """Of one model, by quantization and revision."""
    alike: dict[tuple[Quantization, str], dict[int, ModelManifest]] = {}
    for layer, spec in held.items():
        alike.setdefault((spec.quantization, spec.manifest.revision), {})[layer] = spec.manifest
    for (quantization, revision), manifests in sorted(alike.items()):
        for layers in merge_layers(set(manifests)):
            manifest = manifests[layers.start]
            size = manifest.weight_bytes(layers, quantization)
            yield Shard(manifest.model_id, layers, quantization, ShardState.READY, size, size, revision)


def _listed(ranges: tuple[LayerRange, ...]) -> str:
    return ", ".join(map(str, ranges)) or "none"
