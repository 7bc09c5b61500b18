"""The executor that runs real models: services.node.core.work.Executor on torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from meshnet.errors import (
    BadFiles,
    BrokenLayers,
    InvalidRequest,
    LoadFailed,
    MeshnetError,
    NoRoom,
    NotFinite,
    UnknownModel,
)
from meshnet.logprobs import TokenLogprobs
from meshnet.model import LayerRange
from meshnet.model_files import ModelFiles
from services.node.core.work import (
    CacheWork,
    ForwardWork,
    FreeWork,
    KeepWork,
    LoadedShard,
    Progress,
    PromptWork,
    Result,
    ReuseWork,
    SampleWork,
    ScoreWork,
    ShardSpec,
    Work,
)
from services.node.engine import huge_pages
from services.node.engine.buffers import is_finite, to_buffer, write_rows
from services.node.engine.caches import KvCaches, StepPlan
from services.node.engine.choosing import draw, score
from services.node.engine.config import make_config
from services.node.engine.device import free_bytes, give_back, is_out_of_memory, machine_name
from services.node.engine.held_model import HeldModel
from services.node.engine.kernels import bound_memory, busy_chunk_tokens, loading
from services.node.engine.kv_pool import allocate_pools
from services.node.engine.loading import load_shard
from services.node.engine.precision import BOUNDARY_DTYPE, half_dtype
from services.node.engine.shard import Entry, TorchShard
from services.node.engine.stored import open_fetched, open_files
from services.node.engine.structure import find_structure
from services.node.engine.trial import LayerTrial

_Kind = TypeVar("_Kind")

# Memory that a load no longer uses is given back whenever so many bytes of weights have come, and in the end.
GIVE_BACK_BYTES = 32 << 20


class TorchExecutor:
    """Holds shards of the models that this machine has files of, on one device.

    `threads`: CPU threads that torch uses, in the whole process. `half`: dtype of 16 bits to compute in, default that
    of the device.
    """

    def __init__(
        self,
        models: Mapping[str, ModelFiles],
        device: str = "cpu",
        threads: int = 1,
        half: torch.dtype | None = None,
    ) -> None:
        self._files = dict(models)
        self._device = torch.device(device)
        self._models: dict[str, HeldModel] = {}
        self._caches = KvCaches()
        self._threads = threads
        self._half = half or half_dtype(self._device)
        torch.set_num_threads(threads)
        bound_memory()

    @property
    def machine(self) -> str:
        return f"{machine_name(self._device)}, {self._threads} threads, torch {torch.__version__}"

    @property
    def busy_chunk_tokens(self) -> int:
        return busy_chunk_tokens(self._device)

    def memory_free_bytes(self) -> int:
        return free_bytes(self._device)

    def trial(self, shard: LoadedShard) -> LayerTrial:
        assert isinstance(shard, TorchShard)
        return LayerTrial(shard, self._device)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the memory for KV caches takes, used or not."""
        return self._caches.allocated_bytes

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of KV cache that sessions have taken, in all layers together."""
        return self._caches.num_blocks

    def entry(self, model_id: str) -> Entry:
        """The embedding and head that are held. Raises UnknownModel or WrongLayers. For measurements and tests."""
        return self._held(model_id).entry()

    def check_integrity(self) -> None:
        """Asserts that the KV caches are what they should be."""
        self._caches.check_integrity()

    def load(self, spec: ShardSpec, progress: Progress) -> LoadedShard:
        model_id = spec.manifest.model_id
        if not spec.fetched and model_id not in self._files:
            raise BadFiles(f"this node has no files of model {model_id!r}")
        try:
            # First of all, so that a node that cannot keep the promise reads nothing.
            with loading():
                kv = allocate_pools(
                    spec.manifest,
                    spec.layers,
                    spec.quantization,
                    spec.kv_tokens,
                    self._device,
                    spec.kv_precision,
                    self._half,
                )
                shard = replace(self._load(spec, progress), kv=kv)
                huge_pages.use_for(shard.modules)
                return shard
        except LoadFailed:
            raise
        # The one boundary at which the errors of torch, transformers, bitsandbytes and the file formats arrive.
        except Exception as error:
            if is_out_of_memory(error):
                raise NoRoom(f"out of memory while loading layers {spec.layers} of model {model_id!r}") from error
            reason = f"{type(error).__name__}: {error}"
            raise LoadFailed(f"layers {spec.layers} of model {model_id!r} cannot be loaded: {reason}") from error
        finally:
            give_back()

    def attach(self, shard: LoadedShard) -> None:
        assert isinstance(shard, TorchShard)
        # Layers that are held already are replaced, and what their sessions cached may be of another precision.
        self._caches.remove_layers(shard.model_id, shard.range)
        self._caches.add_layers(shard.model_id, shard.kv)
        self._models.setdefault(shard.model_id, HeldModel(shard)).attach(shard)

    def detach(self, model_id: str, layers: LayerRange) -> None:
        self._caches.remove_layers(model_id, layers)
        model = self._models.get(model_id)
        if model is None:
            return
        model.detach(layers)
        if model.is_empty:
            del self._models[model_id]
        # Quantized layers refer to themselves in circles; without this their memory stays for a while.
        gc.collect()
        give_back()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, batch: Sequence[Work]) -> list[Result]:
        try:
            return self._run(batch)
        # A step that fails as a whole, in whatever way, is the answer to each of its works, and nothing more.
        except Exception as error:
            return [error] * len(batch)

    @torch.inference_mode()
    def _load(self, spec: ShardSpec, progress: Progress) -> TorchShard:
        total = spec.manifest.weight_bytes(spec.layers, spec.quantization)
        loaded = given_back = 0

        def on_bytes(count: int) -> None:
            nonlocal loaded, given_back
            loaded += count
            if loaded - given_back > GIVE_BACK_BYTES:
                give_back()
                given_back = loaded
            progress(min(loaded, total), total)

        stored = open_fetched(spec.fetched) if spec.fetched else open_files(self._files[spec.manifest.model_id])
        structure = find_structure(make_config(stored.config))
        source = stored.source(structure.base, spec.manifest.num_layers)
        return load_shard(spec, structure, source, self._device, on_bytes, self._half)

    @torch.inference_mode()
    def _run(self, batch: Sequence[Work]) -> list[Result]:
        match list(batch):
            case []:
                return []
            case [FreeWork() | KeepWork() | ReuseWork(), *_] as works:
                return [self._manage(work) for work in works if isinstance(work, CacheWork)]
            case [SampleWork(), *_] as works:
                return self._sample(_all_of(works, SampleWork))
            case [ScoreWork(), *_] as works:
                return [self._score(work) for work in _all_of(works, ScoreWork)]
            case [PromptWork(), *_] as works:
                return self._step(_all_of(works, PromptWork))
            case works:
                return self._step(_all_of(works, ForwardWork))

    def _manage(self, work: CacheWork) -> MeshnetError | None:
        try:
            match work:
                case FreeWork():
                    self._caches.free(work.keys)
                case KeepWork():
                    self._caches.keep(work.key, work.num_kept)
                case ReuseWork():
                    self._caches.reuse(work.source, work.target, work.num_reused, take=work.take)
        except MeshnetError as error:
            return error
        return None

    def _model(self, works: Sequence[ForwardWork | PromptWork | SampleWork]) -> HeldModel:
        model_id = works[0].model_id
        assert all(work.model_id == model_id for work in works)
        return self._held(model_id)

    def _held(self, model_id: str) -> HeldModel:
        if model_id not in self._models:
            raise UnknownModel(f"no layers of model {model_id!r} are held here")
        return self._models[model_id]

    def _step(self, works: Sequence[ForwardWork | PromptWork]) -> list[Result]:
        """Runs the works' layers over all their tokens, packed as one row. A work that is refused is left out."""
        model, layers = self._model(works), works[0].layers
        assert all(work.layers == layers for work in works)
        model.check_held(layers)
        plan = StepPlan(self._caches, works[0].model_id, layers, model.context_length)
        refused: dict[int, MeshnetError] = {}
        for index, work in enumerate(works):
            try:
                _check_input(work, model)
                plan.admit(work.segments)
            except MeshnetError as error:
                refused[index] = error
        admitted = [work for index, work in enumerate(works) if index not in refused]
        rows = iter(self._run_admitted(model, layers, plan, admitted) if admitted else [])
        return [refused[index] if index in refused else next(rows) for index in range(len(works))]

    def _run_admitted(
        self, model: HeldModel, layers: LayerRange, plan: StepPlan, works: Sequence[ForwardWork | PromptWork]
    ) -> list[Result]:
        positions = [torch.arange(s.position, s.position + s.num_tokens) for s in plan.segments]
        position_ids = torch.cat(positions)[None].to(self._device)
        hidden = self._input(model, works, position_ids)
        cached = plan.begin()
        hidden = model.forward(layers, hidden, position_ids, cached)[0]
        plan.commit(cached)
        results: list[Result] = [*_split(hidden, works)]
        if not is_finite(hidden):
            for index, error in _broken(hidden, works):
                results[index] = error
        return results

    def _input(
        self, model: HeldModel, works: Sequence[ForwardWork | PromptWork], position_ids: torch.Tensor
    ) -> torch.Tensor:
        """The works' tokens as `[1, tokens, hidden]`."""
        prompts = [work for work in works if isinstance(work, PromptWork)]
        if prompts:
            token_ids = torch.tensor([token for work in prompts for token in work.token_ids], device=self._device)
            return model.entry().embed(token_ids[None], position_ids)
        hidden = torch.empty(position_ids.shape[1], model.hidden_size, dtype=BOUNDARY_DTYPE)
        row = 0
        for work in _all_of(works, ForwardWork):
            write_rows(hidden[row : row + work.num_tokens], work.hidden)
            row += work.num_tokens
        return hidden[None].to(self._device)

    def _sample(self, works: Sequence[SampleWork]) -> list[Result]:
        """Norm and head once for the batch, then a token for each."""
        model = self._model(works)
        hidden = torch.zeros(len(works), model.hidden_size, dtype=BOUNDARY_DTYPE)
        refused: dict[int, MeshnetError] = {}
        for index, work in enumerate(works):
            try:
                write_rows(hidden[index], work.hidden)
            except MeshnetError as error:
                refused[index] = error
        choices = draw(model.entry(), hidden.to(self._device), works)
        return [
            refused.get(index) or (_blamed(choice, hidden[index]) if isinstance(choice, NotFinite) else choice)
            for index, choice in enumerate(choices)
        ]

    def _score(self, work: ScoreWork) -> tuple[TokenLogprobs, ...] | MeshnetError:
        """A work at a time: there is room for the logits of one."""
        try:
            model = self._held(work.model_id)
            hidden = torch.empty(len(work.targets), model.hidden_size, dtype=BOUNDARY_DTYPE)
            write_rows(hidden, work.hidden)
            return score(model.entry(), hidden.to(self._device), work)
        except MeshnetError as error:
            return error


def _all_of(works: Sequence[object], kind: type[_Kind]) -> list[_Kind]:
    assert all(isinstance(work, kind) for work in works), "a batch is of one kind"
    return [work for work in works if isinstance(work, kind)]


def _check_input(work: ForwardWork | PromptWork, model: HeldModel) -> None:
    """Raises InvalidRequest if the input is not as long as the segments, or not of this model."""
    num_tokens = sum(segment.num_tokens for segment in work.segments)
    if not work.segments:
        raise InvalidRequest("a work without segments")
    if isinstance(work, ForwardWork):
        expected = num_tokens * model.hidden_size * BOUNDARY_DTYPE.itemsize
        if memoryview(work.hidden).nbytes != expected:
            raise InvalidRequest(f"{num_tokens} tokens take {expected} bytes, not {memoryview(work.hidden).nbytes}")
        return
    if work.layers.start != 0:
        raise InvalidRequest("token ids can only be run from layer 0 on")
    if len(work.token_ids) != num_tokens:
        raise InvalidRequest(f"the segments have {num_tokens} tokens, {len(work.token_ids)} are given")
    if not all(0 <= token < model.vocab_size for token in work.token_ids):
        raise InvalidRequest(f"a token id is not in the vocabulary of {model.vocab_size} tokens")


def _broken(hidden: torch.Tensor, works: Sequence[ForwardWork | PromptWork]) -> Iterator[tuple[int, MeshnetError]]:
    """Works whose rows of `[tokens, hidden]` are not finite, and whose fault that is."""
    end = 0
    for index, work in enumerate(works):
        begin, end = end, end + work.num_tokens
        if is_finite(hidden[begin:end]):
            continue
        if isinstance(work, ForwardWork):
            given = torch.empty(work.num_tokens, hidden.shape[1], dtype=BOUNDARY_DTYPE)
            write_rows(given, work.hidden)
            if not is_finite(given):
                yield index, NotFinite("the hidden states that came are not finite")
                continue
        yield index, BrokenLayers(f"layers {work.layers} of {work.model_id} computed what is not finite")


def _blamed(error: NotFinite, hidden: torch.Tensor) -> MeshnetError:
    """`hidden`: that the logits came of."""
    return BrokenLayers("the head computed logits that are not finite") if is_finite(hidden) else error


def _split(hidden: torch.Tensor, works: Sequence[ForwardWork | PromptWork]) -> list[memoryview]:
    """Of `[tokens, hidden]`, the rows that each work wants back."""
    results: list[memoryview] = []
    end = 0
    for work in works:
        kept = []
        for segment in work.segments:
            end += segment.num_tokens
            kept.append(hidden[end - segment.num_returned : end])
        results.append(to_buffer(kept[0] if len(kept) == 1 else torch.cat(kept)))
    return results
