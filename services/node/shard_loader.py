"""Turns a LOAD_SHARD into a shard in memory: its weights found or fetched, its room checked, its steps measured."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshnet.directive import Directive
from meshnet.errors import BadFiles, LoadFailed, NoRoom
from meshnet.model import ModelManifest
from meshnet.sizes import format_size
from services.node.config import NodeConfig
from services.node.core.room import Room, shortage
from services.node.core.work import LoadedShard, Progress, ShardSpec
from services.node.core.workspace import largest_step, predict_workspace_bytes
from services.node.fetching.mesh_weights import MeshWeights
from services.node.files.manifest import manifest_of, read_manifest
from services.node.forwarding import Forwarding

log = logging.getLogger(__name__)

# A directive may come a moment before the topology that it follows from.
TOPOLOGY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A shard that is in memory and serves nothing yet. `workspace_bytes`: what its steps take, None: not measured."""

    spec: ShardSpec
    shard: LoadedShard
    workspace_bytes: int | None


class ShardLoader:
    """`manifests` are of the models whose files are here, `mesh_weights` brings those of others."""

    def __init__(
        self,
        config: NodeConfig,
        manifests: Mapping[str, ModelManifest],
        forwarding: Forwarding,
        mesh_weights: MeshWeights | None,
    ) -> None:
        self._config = config
        self._manifests = manifests
        self._forwarding = forwarding
        self._mesh_weights = mesh_weights
        self._refused: dict[str, str] = {}

    def refuse(self, model_id: str, reason: str) -> None:
        """Nothing of that model is loaded any more."""
        self._refused[model_id] = reason

    async def spec(self, directive: Directive) -> ShardSpec:
        """What to load. Raises LoadFailed, before anything starts, if this node cannot do it."""
        if reason := self._refused.get(directive.model_id):
            raise BadFiles(f"layers of {directive.model_id!r} were given up here: {reason}")
        return self._spec(directive, await self._manifest(directive))

    async def load(self, spec: ShardSpec, progress: Progress) -> Loaded:
        """Raises LoadFailed. `progress` hears first of the bytes that are fetched, then of those that are loaded."""
        executor = self._forwarding.runner.executor
        spec, fetched_bytes = await asyncio.to_thread(self._bring, spec, progress)

        def load_progress(bytes_done: int, bytes_total: int) -> None:
            progress(fetched_bytes + bytes_done, fetched_bytes + bytes_total)

        shard = await asyncio.to_thread(executor.load, spec, load_progress)
        return Loaded(spec, shard, await self._measure_workspace(shard, spec))

    async def _manifest(self, directive: Directive) -> ModelManifest:
        """Of the model and revision that the directive means. Raises BadFiles if its weights cannot be had here."""
        own, revision = self._manifests.get(directive.model_id), directive.revision
        if own and revision in ("", own.revision):
            return own
        if weights := self._mesh_weights:
            served = await self._forwarding.changes.wait_until(
                lambda: weights.served(directive.model_id, revision), TOPOLOGY_SECONDS
            )
            if served is None:
                raise LoadFailed(f"the topology names no model {directive.model_id!r} of revision {revision[:12]}")
            return served
        if own is None:
            raise BadFiles(
                f"this node has no files of model {directive.model_id!r}: start it with --model ID=PATH, "
                "or without --no-fetch"
            )
        raise BadFiles(
            f"this node's files of model {directive.model_id!r} are another revision: "
            f"{own.revision[:12]} here, {revision[:12]} in the mesh"
        )

    def _spec(self, directive: Directive, manifest: ModelManifest) -> ShardSpec:
        if directive.layers not in manifest.all_layers:
            raise LoadFailed(f"model {directive.model_id!r} has {manifest.num_layers} layers, not {directive.layers}")
        config = self._config
        accepted = (config.quantization, *config.fallbacks)
        if directive.quantization not in accepted:
            raise LoadFailed(f"this node stores weights at {', '.join(accepted)}, not at {directive.quantization}")
        shards = self._forwarding.shards
        held = shards.layers(directive.model_id)
        if held and shards.manifest(directive.model_id).revision != manifest.revision:
            raise LoadFailed(f"layers of another revision of model {directive.model_id!r} are held here")
        if not held.isdisjoint(directive.layers.layers):
            raise LoadFailed(f"some of layers {directive.layers} are held here already")
        spec = ShardSpec(
            manifest, directive.layers, directive.quantization, directive.kv_tokens, directive.kv_precision
        )
        self._check_room(spec)
        return spec

    def _check_room(self, spec: ShardSpec) -> None:
        """Raises NoRoom if the shard is predicted to take more than is lent, or than is really free."""
        shards, executor = self._forwarding.shards, self._forwarding.runner.executor
        weights = spec.manifest.weight_bytes(spec.layers, spec.quantization)
        free = executor.memory_free_bytes()
        room = Room(self._config.vram_bytes, shards.held_bytes(), shards.workspace_bytes(), free)
        # A stub runs no steps.
        workspace = 0 if free is None else _predicted_workspace(spec)
        if short := shortage(room, weights, spec.kv_bytes, workspace):
            raise NoRoom(f"layers {spec.layers} of {spec.manifest.model_id} at {spec.quantization}: {short}")

    def _bring(self, spec: ShardSpec, progress: Progress) -> tuple[ShardSpec, int]:
        """Makes sure that the shard's weights are on the disk. Returns what is to be loaded, and how many bytes of
        progress it took to bring it. Raises LoadFailed."""
        manifest = spec.manifest
        is_own = manifest == self._manifests.get(manifest.model_id)
        if is_own and (manifest.model_id in self._config.models or self._mesh_weights is None):
            self._check_files(manifest)
            return spec, 0
        assert self._mesh_weights, "the manifest is that of the files here, or of what the mesh serves"
        size, fetched_bytes = manifest.weight_bytes(spec.layers, spec.quantization), 0

        def fetch_progress(bytes_done: int, bytes_total: int) -> None:
            nonlocal fetched_bytes
            fetched_bytes = bytes_total
            progress(bytes_done, bytes_total + size)

        fetched = self._mesh_weights.fetch(manifest, spec.layers, fetch_progress)
        # Of the same model, and with what only its files tell.
        described = manifest_of(manifest.model_id, fetched.description)
        return replace(spec, manifest=described, fetched=fetched.folder), fetched_bytes

    def _check_files(self, manifest: ModelManifest) -> None:
        """Files that were exchanged since the manifest was read would make layers of another model, silently. Raises
        BadFiles."""
        files = self._config.models.get(manifest.model_id)
        if files is None:
            return
        try:
            revision = read_manifest(files).revision
        except LoadFailed as error:
            raise BadFiles(str(error)) from error
        if revision != manifest.revision:
            raise BadFiles(f"the files of model {manifest.model_id!r} have changed since this node started: restart it")

    async def _measure_workspace(self, shard: LoadedShard, spec: ShardSpec) -> int | None:
        """What the largest step takes beside weights and KV cache; a shard that has no room for it cannot serve."""
        runner, manifest = self._forwarding.runner, spec.manifest
        trial = runner.executor.trial(shard)
        if trial is None:
            return None
        layer = largest_step(manifest, spec.layers, spec.quantization, spec.kv_tokens)
        try:
            measured: int | None = await runner.call(lambda: trial.workspace_bytes(spec.kv_tokens, layer))
        finally:
            await runner.call(trial.close)
        predicted = _predicted_workspace(spec)
        log.info(
            "layers %s of %s take %s of weights (predicted %s), %s of KV cache (predicted %s), "
            "their steps %s of workspace (predicted %s)",
            spec.layers,
            manifest.model_id,
            format_size(shard.weight_bytes),
            format_size(manifest.weight_bytes(spec.layers, spec.quantization)),
            format_size(shard.kv_bytes),
            format_size(spec.kv_bytes),
            "an unknown number of bytes" if measured is None else format_size(measured),
            format_size(predicted),
        )
        return measured


def _predicted_workspace(spec: ShardSpec) -> int:
    manifest = spec.manifest
    if not manifest.steps and manifest.workspaces:
        # Its files are elsewhere; this is what somebody predicted who has them.
        return manifest.workspace_bytes(spec.quantization, spec.kv_tokens)
    return predict_workspace_bytes(
        manifest, spec.quantization, spec.kv_tokens, entry=spec.layers.start == 0, layers=spec.layers
    )
