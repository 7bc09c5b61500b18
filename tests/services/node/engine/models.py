"""Small random models of each supported architecture, and a mesh of shards in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshnet.model import KvPrecision, LayerRange, ModelManifest, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import (
    ForwardWork,
    FreeWork,
    PromptWork,
    SampleWork,
    Sampling,
    Segment,
    SessionKey,
    ShardSpec,
)
from services.node.engine.executor import TorchExecutor
from services.node.engine.shard import TorchShard
from services.node.files.manifest import read_manifest

MODEL = "tiny"
VOCAB = 199

_LLAMA_LIKE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
# So short that prompts are longer, and that the last chunks of a session see nothing of its first.
WINDOW = 9
_WINDOWED = {**_LLAMA_LIKE, "sliding_window": WINDOW}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FALCON = {key: value for key, value in _LLAMA_LIKE.items() if key not in ("intermediate_size", "num_key_value_heads")}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
}
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "vocab_size": VOCAB}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA_LIKE},
    "llama-tied-head-dim": {"model_type": "llama", **_LLAMA_LIKE, "head_dim": 32, "tie_word_embeddings": True},
    "llama3-rope": {
        "model_type": "llama",
        **_LLAMA_LIKE,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", **_LLAMA_LIKE, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **_LLAMA_LIKE},
    "qwen3": {"model_type": "qwen3", **_LLAMA_LIKE, "head_dim": 32},
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gpt2-scaled-by-layer": {"model_type": "gpt2", **_GPT2, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {"model_type": "gpt_neox", **_LLAMA_LIKE, "rotary_pct": 0.5},
    "mistral-window": {"model_type": "mistral", **_WINDOWED},
    "qwen2-window": {"model_type": "qwen2", **_WINDOWED, "use_sliding_window": True, "layer_types": _ALTERNATING},
    "gemma2": {
        "model_type": "gemma2",
        **_WINDOWED,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 1.5,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_WINDOWED,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "phi3": {"model_type": "phi3", **_WINDOWED, "pad_token_id": 0},
    "phi3-longrope": {
        "model_type": "phi3",
        **_LLAMA_LIKE,
        "pad_token_id": 0,
        "original_max_position_embeddings": 128,
        "rope_parameters": _LONGROPE,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
    },
    "olmo": {"model_type": "olmo", **_LLAMA_LIKE, "clip_qkv": 0.8},
    "stablelm": {"model_type": "stablelm", **_LLAMA_LIKE, "qk_layernorm": True, "use_qkv_bias": True},
    "stablelm-parallel": {"model_type": "stablelm", **_LLAMA_LIKE, "use_parallel_residual": True},
    "falcon-multi-query": {"model_type": "falcon", **_FALCON},
    "falcon-new": {"model_type": "falcon", **_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-heads": {"model_type": "falcon", **_FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
    "mixtral": {"model_type": "mixtral", **_LLAMA_LIKE, "num_local_experts": 4},
    "mixtral-window": {"model_type": "mixtral", **_WINDOWED, "num_local_experts": 4},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_LLAMA_LIKE,
        **_MIXTURE,
        "head_dim": 32,
        "num_experts": 6,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "gemma": {"model_type": "gemma", **_LLAMA_LIKE, "head_dim": 32},
    "cohere": {"model_type": "cohere", **_LLAMA_LIKE, "logit_scale": 0.3, "use_qk_norm": True, "pad_token_id": 0},
    "granite": {
        "model_type": "granite",
        **_LLAMA_LIKE,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "olmo2": {"model_type": "olmo2", **_LLAMA_LIKE},
    "olmo3": {"model_type": "olmo3", **_WINDOWED},
    "phi": {"model_type": "phi", **_LLAMA_LIKE},
    "smollm3": {"model_type": "smollm3", **_LLAMA_LIKE, "no_rope_layers": [1, 1, 0, 1], "pad_token_id": 0},
    "starcoder2": {"model_type": "starcoder2", **_WINDOWED},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_LLAMA_LIKE,
        **_MIXTURE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_WINDOWED,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": _ALTERNATING,
    },
}


def save_model(path: Path, options: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> ModelFiles:
    """A seeded model whose weights, biases and norms are all far from their defaults."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1.0 + 0.1 * noise if is_scale else 0.1 * noise)
    model.to(dtype).save_pretrained(path)
    return ModelFiles(MODEL, path)


def steady(options: dict[str, Any]) -> dict[str, Any]:
    """The model with all experts chosen for each token. Of two that are nearly as good bfloat16 may choose another than
    float32 does, or other kernels, and in transformers too what comes out is then far off: no rounding to be compared.
    """
    experts = options.get("num_local_experts") or options.get("num_experts")
    return options if experts is None else {**options, "num_experts_per_tok": experts}


def splits_of(num_layers: int, *ends: int) -> list[LayerRange]:
    bounds = [0, *ends, num_layers]
    return [LayerRange(start, end) for start, end in pairwise(bounds)]


@dataclass(slots=True)
class Mesh:
    """One executor a shard; a prompt flows through them as it would through nodes."""

    manifest: ModelManifest
    shards: list[tuple[TorchExecutor, LayerRange]]
    device: str = "cpu"
    lengths: dict[str, int] = field(default_factory=dict)

    def step(
        self, chunks: Mapping[str, Sequence[int]], positions: Mapping[str, int] | None = None
    ) -> dict[str, memoryview]:
        """Runs some tokens of each session, packed. Returns each one's last hidden state."""
        row = self.manifest.hidden_size * 2
        return {session: rows[-row:] for session, rows in self.rows(chunks, positions).items()}

    def rows(
        self, chunks: Mapping[str, Sequence[int]], positions: Mapping[str, int] | None = None
    ) -> dict[str, memoryview]:
        """The same, of all tokens that are run: `[tokens, hidden]` in bfloat16."""
        at = {session: (positions or {}).get(session, self.lengths.get(session, 0)) for session in chunks}
        hidden: list[Any] = []
        for executor, layers in self.shards:
            segments = [
                Segment(SessionKey(session, self.manifest.model_id, layers), at[session], len(ids), len(ids))
                for session, ids in chunks.items()
            ]
            works: list[ForwardWork | PromptWork] = [
                ForwardWork(self.manifest.model_id, layers, (segment,), hidden[index])
                if layers.start
                else PromptWork(self.manifest.model_id, layers, (segment,), tuple(ids))
                for index, (segment, ids) in enumerate(zip(segments, chunks.values(), strict=True))
            ]
            hidden = run(executor, works)
            executor.check_integrity()
        self.lengths |= {session: at[session] + len(ids) for session, ids in chunks.items()}
        return dict(zip(chunks, hidden, strict=True))

    def logits(self, rows: memoryview) -> torch.Tensor:
        """Of hidden states: `[tokens, vocab]` in the dtype of the shards."""
        hidden = torch.frombuffer(bytearray(rows), dtype=torch.bfloat16).view(-1, self.manifest.hidden_size)
        entry = self.shards[0][0].entry(self.manifest.model_id)
        with torch.inference_mode():
            return entry.logits(hidden.to(self.device))

    def sample(self, hidden: dict[str, memoryview], sampling: Sampling | None = None) -> dict[str, int]:
        works = [SampleWork(self.manifest.model_id, row, sampling or Sampling(), 0.5) for row in hidden.values()]
        choices = run(self.shards[0][0], works)
        return {session: choice.token_id for session, choice in zip(hidden, choices, strict=True)}

    def generate(
        self, prompts: Mapping[str, Sequence[int]], num_tokens: int, chunk: int = 1 << 20
    ) -> dict[str, list[int]]:
        """Greedy, all sessions together; prompts go in chunks."""
        emitted: dict[str, list[int]] = {session: [] for session in prompts}
        last: dict[str, memoryview] = {}
        for session, prompt in prompts.items():
            for start in range(0, len(prompt), chunk):
                last |= self.step({session: prompt[start : start + chunk]})
        for _ in range(num_tokens):
            tokens = self.sample(last)
            for session, token in tokens.items():
                emitted[session].append(token)
            last = self.step({session: [token] for session, token in tokens.items()})
        return emitted

    def free(self, *sessions: str) -> None:
        for executor, layers in self.shards:
            run(executor, [FreeWork(tuple(SessionKey(s, self.manifest.model_id, layers) for s in sessions))])
        for session in sessions:
            self.lengths.pop(session, None)


def run(executor: TorchExecutor, works: Sequence[Any]) -> list[Any]:
    """Runs a batch none of whose works may fail."""
    results = executor.run(works)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@contextmanager
def mesh(
    files: ModelFiles,
    splits: Sequence[LayerRange] | None = None,
    quantization: Quantization = Quantization.BFLOAT16,
    device: str = "cpu",
    kv_tokens: int = 1024,
    half: torch.dtype | None = None,
    kv_precision: KvPrecision = KvPrecision.BFLOAT16,
) -> Iterator[Mesh]:
    """A mesh that holds the whole model. Asserts that nothing is left of its sessions' caches in the end."""
    manifest = read_manifest(files)
    spans = splits or [manifest.all_layers]
    loaded = [[load(files, layers, quantization, device, kv_tokens, half, kv_precision)] for layers in spans]
    with mesh_of(files, loaded, device, half) as shards:
        yield shards


def load(
    files: ModelFiles,
    layers: LayerRange,
    quantization: Quantization,
    device: str = "cpu",
    kv_tokens: int = 1024,
    half: torch.dtype | None = None,
    kv_precision: KvPrecision = KvPrecision.BFLOAT16,
) -> TorchShard:
    spec = ShardSpec(read_manifest(files), layers, quantization, kv_tokens, kv_precision)
    shard = TorchExecutor({files.model_id: files}, device, half=half).load(spec, lambda done, total: None)
    assert isinstance(shard, TorchShard)
    return shard


@contextmanager
def mesh_of(
    files: ModelFiles, nodes: Sequence[Sequence[TorchShard]], device: str = "cpu", half: torch.dtype | None = None
) -> Iterator[Mesh]:
    """The same of shards that are loaded, those of each node adjoining. They can be used again after it."""
    shards = []
    for held in nodes:
        executor = TorchExecutor({files.model_id: files}, device, half=half)
        for shard in held:
            executor.attach(shard)
        shards.append((executor, LayerRange(held[0].range.start, held[-1].range.end)))
    yield Mesh(read_manifest(files), shards, device)
    for executor, layers in shards:
        executor.check_integrity()
        executor.detach(files.model_id, layers)
        assert executor.kv_bytes == 0


def prompt_of(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(vocab, (length,), generator=generator)]
