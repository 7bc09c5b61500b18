"""Which models the mesh has been asked to serve, and how. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshnet.errors import InvalidRequest, UnknownModel
from meshnet.model import BLOCK_TOKENS, KvPrecision, ModelManifest, blocks_for
from meshnet.topology import DeployedModel
from services.tracker.effects import Note
from services.tracker.registry import Registry
from services.tracker.remembered import Remembered, Save, SaveModel, SaveUndeployed
from services.tracker.view import described_model


class Deployments:
    """`models` by id. `notes` and `saves` gather what changes ask for, until somebody takes them."""

    def __init__(self, registry: Registry, auto_deploy: Collection[str], remembered: Remembered) -> None:
        self.models: dict[str, DeployedModel] = dict(remembered.models)
        self.notes: list[Note] = []
        self.saves: list[Save] = []
        self._registry = registry
        # An undeploy is the later word than a flag of the command line that is the same at every start.
        self._to_deploy = set(auto_deploy) - self.models.keys() - remembered.undeployed
        for model in self.models.values():
            registry.pin(model.manifest)
            self._note(f"model {model.model_id} is deployed, as before the restart")
        for model_id in sorted(remembered.undeployed & set(auto_deploy)):
            self._note(f"model {model_id} stays undeployed, as it was left: `meshnet deploy {model_id}` brings it back")

    def due(self) -> list[str]:
        """Models that are to be deployed as soon as a node has their files, and now one has."""
        return sorted(self._to_deploy & self._registry.manifests.keys())

    def wished(
        self,
        model_id: str,
        kv_tokens: int,
        priority: int,
        max_context: int = 0,
        sessions: int = 0,
        replicas: int = 0,
        kv_precision: KvPrecision = KvPrecision.BFLOAT16,
    ) -> DeployedModel:
        """A model as somebody wants it deployed.

        `max_context` 0: what the model was made for. `kv_tokens` 0: as many as `sessions` (0: one) of that length take.
        Either is rounded up to whole blocks of 128, as nodes allocate them. `replicas` 0: as many as there is room for.
        Raises UnknownModel or InvalidRequest.
        """
        manifest = self._known(model_id)
        if max_context > manifest.context_length:
            raise InvalidRequest(
                f"model {model_id} was made for {manifest.context_length} tokens, not for {max_context}"
            )
        if kv_tokens and sessions:
            raise InvalidRequest("name either the tokens of the KV cache or the sessions that it has room for")
        if kv_precision is KvPrecision.INT8 and not manifest.kv_scales_per_token:
            raise InvalidRequest(
                f"what is known of model {model_id} is of an older meshnet, which did not say what its KV cache takes "
                "at int8: undeploy it first"
            )
        context = max_context or manifest.context_length
        limit = None if context == manifest.context_length else context
        room = blocks_for(kv_tokens or context) * BLOCK_TOKENS * (sessions or 1)
        return DeployedModel(manifest, room, priority, limit, replicas or None, kv_precision)

    def check_room(self, model: DeployedModel, held: Iterable[str]) -> None:
        """Loaded shards keep the KV cache that they were loaded with. `held`: ids of models that nodes hold. Raises
        InvalidRequest if another size or precision is wished for."""
        old = self.models.get(model.model_id)
        if old is None or model.model_id not in held:
            return
        # In blocks, as nodes hold them: one that is remembered from an older version need not be a multiple.
        if blocks_for(old.kv_tokens) != blocks_for(model.kv_tokens):
            raise InvalidRequest(
                f"model {model.model_id} is loaded with KV cache room for {old.kv_tokens} tokens, not "
                f"{model.kv_tokens}: undeploy it first, or deploy it with the same number"
            )
        if old.kv_precision is not model.kv_precision:
            raise InvalidRequest(
                f"model {model.model_id} is loaded with KV caches at {old.kv_precision}, not {model.kv_precision}: "
                "undeploy it first, or deploy it with the same precision"
            )

    def put(self, model: DeployedModel) -> None:
        old = self.models.get(model.model_id)
        self.models[model.model_id] = model
        self._to_deploy.discard(model.model_id)
        self._registry.pin(model.manifest)
        if model != old:
            self.saves.append(SaveModel(model))
            self._note(f"model {described_model(model)}")

    def remove(self, model_id: str) -> None:
        """Raises UnknownModel for a model that is not deployed."""
        self.get(model_id)
        del self.models[model_id]
        self._to_deploy.discard(model_id)
        self._registry.unpin(model_id)
        self.saves.append(SaveUndeployed(model_id))
        self._note(f"model {model_id} undeployed")

    def get(self, model_id: str) -> DeployedModel:
        """Raises UnknownModel, naming the deployed models."""
        if model_id not in self.models:
            deployed = ", ".join(sorted(self.models)) or "none"
            raise UnknownModel(f"model {model_id!r} is not deployed; deployed models: {deployed}")
        return self.models[model_id]

    def _known(self, model_id: str) -> ModelManifest:
        manifest = self._registry.manifests.get(model_id)
        if manifest is None:
            known = ", ".join(sorted(self._registry.manifests)) or "none"
            raise UnknownModel(
                f"no node has the files of model {model_id!r}; known models: {known}. "
                f"Start a node that has them: --model {model_id}=PATH"
            )
        return manifest

    def _note(self, text: str) -> None:
        self.notes.append(Note(text))
