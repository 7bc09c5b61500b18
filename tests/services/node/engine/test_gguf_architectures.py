"""GGUF files of each architecture: against transformers' own reading where it has one, and against the model that they
were made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from meshnet.model import BLOCK_TOKENS, LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import ShardSpec
from services.node.engine.config import make_config
from services.node.engine.gguf_weights import GgufSource
from services.node.engine.held_model import HeldModel
from services.node.engine.kv_cache import KvCache
from services.node.engine.kv_pool import allocate_pools
from services.node.engine.loading import load_shard
from services.node.engine.segments import CachedSegment
from services.node.engine.structure import find_structure
from services.node.files.gguf_config import gguf_config
from services.node.files.gguf_header import open_gguf
from services.node.files.manifest import read_manifest
from tests.services.node.engine.gguf_files import write_gguf
from tests.services.node.engine.models import TINY, prompt_of, save_model, splits_of

LOGITS_TOLERANCE = 1e-4
PROMPT = prompt_of(40)
NUM_LAYERS = 4

_STABLELM_PLAIN = {**TINY["stablelm"], "qk_layernorm": False, "use_qkv_bias": False}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
# The models of TINY whose files say all that is in them, and those that only their files' limits make different.
MODELS: dict[str, dict[str, Any]] = {
    name: TINY[name]
    for name in (
        "llama", "llama-tied-head-dim", "llama3-rope", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma",
        "gemma2", "phi3", "phi3-longrope", "olmo", "olmo2", "olmo3", "stablelm", "stablelm-parallel",
        "falcon-multi-query", "falcon-new", "mixtral", "cohere", "granite", "gpt_oss",
    )
} | {
    "llama-bias": {**TINY["llama"], "attention_bias": True, "mlp_bias": True},
    "llama-linear": {**TINY["llama"], "rope_parameters": _LINEAR},
    "qwen2-yarn": {**TINY["qwen2"], "rope_parameters": _YARN},
    "gemma3": {**TINY["gemma3"], "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
    "phi": {**TINY["phi"], "intermediate_size": 256, "num_key_value_heads": 4},
    "phi3-partial": {**TINY["phi3"], "sliding_window": None, "partial_rotary_factor": 0.75},
    "stablelm-plain": _STABLELM_PLAIN,
    "falcon-one-norm": {**TINY["falcon-new"], "num_ln_in_parallel_attn": 1},
    "smollm3": {**TINY["smollm3"], "no_rope_layers": None},
    "starcoder2": {**TINY["starcoder2"], "sliding_window": None},
    "qwen2_moe": {**TINY["qwen2_moe"], "decoder_sparse_step": 1},
    "qwen3_moe": {**TINY["qwen3_moe"], "mlp_only_layers": []},
}  # fmt: skip
MODELS["gemma2"] = {**MODELS["gemma2"], "query_pre_attn_scalar": 32}
MODELS["gpt_neox"] = {**MODELS["gpt_neox"], "use_parallel_residual": False}

# What transformers reads too. Of Falcon it does not undo the grouping, of GPT-OSS and others it reads nothing.
READ_BY_TRANSFORMERS = (
    "llama", "llama-tied-head-dim", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gpt2", "falcon-multi-query", "phi3",
    "stablelm-plain", "starcoder2", "gemma2", "gemma3",
)  # fmt: skip


@pytest.fixture(scope="module", params=list(MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save_model(tmp_path_factory.mktemp(kind), {**MODELS[kind]}, torch.float32)


@pytest.fixture(scope="module")
def model(directory: ModelFiles) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def file(directory: ModelFiles, model: Any) -> ModelFiles:
    return write_gguf(directory.path / "model.gguf", model)


def source_of(file: ModelFiles, num_layers: int) -> GgufSource:
    reader = open_gguf(file)
    return GgufSource(reader, gguf_config(reader), num_layers)


def test_every_tensor_is_that_of_the_model(file: ModelFiles, model: Any) -> None:
    source = source_of(file, model.config.num_hidden_layers)
    wanted = dict(model.named_parameters())
    assert not source.leftovers(wanted)
    for name, parameter in wanted.items():
        # One was added to the norms of Gemma, and it is taken away.
        torch.testing.assert_close(source.read(name, torch.float32), parameter.detach(), rtol=0, atol=2e-7, msg=name)


@pytest.mark.parametrize("kind", READ_BY_TRANSFORMERS, scope="module")
def test_every_tensor_is_what_transformers_reads(file: ModelFiles, model: Any) -> None:
    source = source_of(file, model.config.num_hidden_layers)
    # Its config of some files is not that of the model, so that it is given the model.
    wanted = load_gguf_checkpoint(str(file.path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(dict(model.named_parameters())) <= set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(source.read(name, torch.float32), tensor.reshape(model.get_parameter(name).shape)), name


def test_logits_are_those_of_the_model(file: ModelFiles, model: Any) -> None:
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    seen = sharded_logits(file, model.config.num_hidden_layers, 1, 3)
    assert float((seen - wanted).abs().max() / wanted.abs().max()) < LOGITS_TOLERANCE


def test_the_manifest_is_that_of_the_directory(kind: str, file: ModelFiles, directory: ModelFiles) -> None:
    of_file, of_directory = read_manifest(file), read_manifest(directory)
    assert of_file.layers == of_directory.layers
    assert of_file.entry == of_directory.entry
    assert of_file.kv_bytes_per_token == of_directory.kv_bytes_per_token
    assert of_file.architecture.replace("Llama", "Mistral") == of_directory.architecture.replace("Llama", "Mistral")
    assert (kind == "falcon-one-norm") or of_file.context_length == of_directory.context_length


@torch.inference_mode()
def sharded_logits(file: ModelFiles, num_layers: int, *ends: int) -> torch.Tensor:
    """Of the prompt in two steps, through shards in float32."""
    manifest, shards, caches = read_manifest(file), [], []
    for layers in splits_of(num_layers, *ends):
        reader = open_gguf(file)
        config = gguf_config(reader)
        structure = find_structure(make_config(config))
        pools = allocate_pools(manifest, layers, Quantization.FLOAT32, BLOCK_TOKENS, torch.device("cpu"))
        spec = ShardSpec(manifest, layers, Quantization.FLOAT32, BLOCK_TOKENS)
        shard = load_shard(
            spec, structure, GgufSource(reader, config, num_layers), torch.device("cpu"), lambda count: None
        )
        held = HeldModel(shard)
        held.attach(shard)
        caches.append(KvCache(layers, pools))
        caches[-1].reserve(len(PROMPT))
        shards.append((held, layers))
    rows = [_step(shards, caches, start, end) for start, end in ((0, 29), (29, len(PROMPT)))]
    return torch.cat(rows)


def _step(shards: list[tuple[HeldModel, LayerRange]], caches: list[KvCache], start: int, end: int) -> torch.Tensor:
    positions = torch.arange(start, end)[None]
    hidden = shards[0][0].entry().embed(torch.tensor([PROMPT[start:end]]), positions)
    for (held, layers), cache in zip(shards, caches, strict=True):
        hidden = held.forward(layers, hidden, positions, [CachedSegment(0, end - start, start, cache)])
        cache.length = end
    return shards[0][0].entry().logits(hidden[0])
