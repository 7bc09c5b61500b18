"""What is read of GGUF files, how, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshnet.errors import BadFiles, LoadFailed
from meshnet.model import LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import ShardSpec
from services.node.engine import gguf_weights
from services.node.engine.config import make_config
from services.node.engine.gguf_weights import GgufSource
from services.node.engine.loading import load_shard
from services.node.engine.stored import open_fetched, open_files
from services.node.engine.structure import find_structure
from services.node.files.description import describe
from services.node.files.fetched import FetchedModel
from services.node.files.gguf_config import gguf_config
from services.node.files.gguf_header import open_gguf
from services.node.files.manifest import manifest_of, shard_tensors
from tests.services.node.engine.gguf_files import finish, write_gguf
from tests.services.node.engine.models import MODEL, TINY, mesh, prompt_of, save_model, splits_of

QUERY, EXPERT = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.down_proj"
NUM_EXPERTS = 3


def readable(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


READABLE = [kind for kind in gguf.GGMLQuantizationType if readable(kind)]


def test_the_library_reads_what_files_are_made_of() -> None:
    names = {kind.name for kind in READABLE}
    assert names >= {"F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ1_S", "IQ4_XS", "MXFP4"}


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_rows_and_experts_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: gguf.GGMLQuantizationType
) -> None:
    columns, row_bytes = (2 * size for size in gguf.GGML_QUANT_SIZES[kind])
    generator = np.random.default_rng(0)
    # Of bytes so small no scale is infinite or not a number.
    matrix = generator.integers(0, 120, (7, row_bytes), np.uint8)
    stack = generator.integers(0, 120, (NUM_EXPERTS, 5, row_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    writer.add_tensor("blk.0.attn_q.weight", matrix, raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_down_exps.weight", stack, raw_dtype=kind)
    finish(writer)
    source = GgufSource(gguf.GGUFReader(tmp_path / "model.gguf"), {"model_type": "qwen3_moe"}, 1)
    monkeypatch.setattr(gguf_weights, "_BLOCK_VALUES", 2 * columns)
    sizes: list[int] = []
    dequantize: Callable[..., Any] = gguf.dequantize

    def counted(data: np.ndarray[Any, Any], of: gguf.GGMLQuantizationType) -> Any:
        sizes.append(data.nbytes)
        return dequantize(data, of)

    monkeypatch.setattr(gguf, "dequantize", counted)

    def same(seen: torch.Tensor, stored: np.ndarray[Any, Any]) -> bool:
        whole = torch.from_numpy(np.array(dequantize(stored, kind)))
        return torch.equal(seen, whole)

    assert same(source.read(QUERY, torch.float32), matrix)
    for expert in range(NUM_EXPERTS):
        assert same(source.read_expert(EXPERT, expert, torch.float32), stack[expert])
    assert max(sizes) <= 2 * row_bytes


def test_gpt_oss_keeps_its_mxfp4_experts_until_each_is_read(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, TINY["gpt_oss"]).path, dtype=torch.float32)
    kinds = {r"_exps\.weight": gguf.GGMLQuantizationType.MXFP4}
    files = write_gguf(tmp_path / "model.gguf", model, kinds)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(files.path).tensors}
    assert stored["blk.0.ffn_up_exps.weight"].tensor_type is gguf.GGMLQuantizationType.MXFP4
    gate, up, down = (
        torch.from_numpy(gguf.dequantize(stored[f"blk.0.ffn_{part}_exps.weight"].data, kinds[r"_exps\.weight"]))
        for part in ("gate", "up", "down")
    )
    source = open_files(files).source("model", 4)
    # Of the module, gate and up are every other output, and weights are [in, out].
    gate_up = source.read("model.layers.0.mlp.experts.gate_up_proj", torch.float32)
    assert torch.equal(gate_up[..., ::2], gate.mT)
    assert torch.equal(gate_up[..., 1::2], up.mT)
    assert torch.equal(source.read("model.layers.0.mlp.experts.down_proj", torch.float32), down.mT)
    with mesh(files, splits_of(4, 2)) as shards:
        assert len(shards.generate({"a": prompt_of(9)}, 2)["a"]) == 2


def test_a_shard_is_loaded_of_a_file_with_holes(tmp_path: Path) -> None:
    """Its rotary factors are in the description, and are not fetched."""
    options = {**TINY["mixtral"], "rope_parameters": TINY["llama3-rope"]["rope_parameters"]}
    directory = save_model(tmp_path / "directory", options)
    model = AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32)
    files = write_gguf(tmp_path / "model.gguf", model)
    description, whole = describe(files), files.path.read_bytes()
    assert "rope_freqs.weight" in description.tensors
    fetched = FetchedModel.create(tmp_path / "fetched" / "revision", description)
    fetched.claim()
    fetched.write("model.gguf", 0, whole[: description.header_bytes("model.gguf")])
    fetched.check_header("model.gguf")
    names = shard_tensors(description, LayerRange(2, 4))
    assert {name.split(".")[1] for name in names} == {"2", "3"}
    assert shard_tensors(description, LayerRange(0, 1)) >= {"token_embd.weight", "output.weight"}
    for name in names:
        tensor = description.tensors[name]
        fetched.write("model.gguf", tensor.begin, whole[tensor.begin : tensor.begin + tensor.num_bytes])
    fetched.add(names)
    fetched.close()
    stored = open_fetched(fetched.folder)
    structure = find_structure(make_config(stored.config))
    source = stored.source("model", 4)
    spec = ShardSpec(manifest_of(MODEL, description), LayerRange(2, 4), Quantization.BFLOAT16, 64)
    load_shard(spec, structure, source, torch.device("cpu"), lambda count: None)
    with pytest.raises(BadFiles, match="has not been fetched"):
        source.read(QUERY, torch.float32)
    with pytest.raises(BadFiles, match="has not been fetched"):
        source.read_expert(EXPERT, 0, torch.float32)


def test_an_expert_that_is_none_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    writer.add_tensor("blk.0.ffn_down_exps.weight", np.zeros((NUM_EXPERTS, 4, 4), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    source = GgufSource(gguf.GGUFReader(tmp_path / "model.gguf"), {"model_type": "qwen3_moe"}, 1)
    for name, expert in ((EXPERT, NUM_EXPERTS), (QUERY, 0), ("model.layers.0.mlp.experts.gate_up_proj", 0)):
        with pytest.raises(BadFiles):
            source.read_expert(name, expert, torch.float32)


SIZES = {
    "context_length": 64,
    "block_count": 1,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
FACTORS = {"rope_freqs.weight": [1.0, 2.0, 4.0, 8.0]}


def header_only(
    path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, list[float]] | None = None
) -> ModelFiles:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**{f"{architecture}.{key}": size for key, size in SIZES.items()}, **keys}.items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case list():
                writer.add_array(key, value)
            case _:
                writer.add_string(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.array(values, np.float32))
    finish(writer)
    return ModelFiles(MODEL, path)


@pytest.mark.parametrize(
    ("architecture", "keys", "tensors", "reason"),
    [
        ("mamba", {}, {}, "architecture 'mamba' are not supported; supported are command-r"),
        ("llama", {"split.count": 3}, {}, "split into 3 GGUF files"),
        ("llama", {"llama.rope.scaling.type": "dynamic"}, {}, "scaled by 'dynamic'"),
        ("llama", {"llama.rope.scaling.type": "linear"}, FACTORS, "beside scaling"),
        ("llama", {}, {"rope_freqs.weight": [1.0, 2.0]}, "does not hold 4 rotary factors"),
        ("llama", {}, {"rope_freqs.weight": [1.0, 0.0, 1.0, 1.0]}, "does not hold 4 rotary factors"),
        ("llama", {}, {"rope_factors_long.weight": [1.0] * 4}, "alone"),
        ("llama", {"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, {}, "4 of 8 values"),
        ("llama", {"llama.attention.max_alibi_bias": 8.0}, {}, "max_alibi_bias = 8.0"),
        ("llama", {"llama.attention.scale": 0.3}, {}, "attention.scale"),
        ("llama", {"llama.attention.sliding_window": 8}, {}, "sliding_window = 8"),
        ("llama", {"llama.attention.head_count": [4, 2]}, {}, "layer by layer"),
        ("llama", {"llama.embedding_length": None}, {}, "no size"),
        ("llama", {"llama.attention.layer_norm_rms_epsilon": None}, {}, "does not state"),
        ("llama", {"llama.block_count": 1 << 30}, {}, "names 1073741824 layers"),
        ("qwen2", {"qwen2.attention.head_count": 64}, {}, "more heads"),
        ("qwen3", {"qwen3.expert_count": 8}, {}, "expert_count = 8"),
        ("qwen2", {"qwen2.rope.dimension_count": 4}, {}, "4 of 8 values"),
        ("phi2", {"phi2.attention.key_length": 16, "phi2.attention.layer_norm_epsilon": 1e-5}, {}, "head size"),
        ("falcon", {"falcon.attention.head_count_kv": 4, "falcon.attention.layer_norm_epsilon": 1e-5}, {},
         "a key for each head"),
        ("gemma3", {"gemma3.attention.sliding_window": 8, "gemma3.attention.sliding_window_pattern": [True, False]}, {},
         "kinds of attention"),
        ("phi3", {}, {"rope_factors_long.weight": [1.0] * 4, "rope_factors_short.weight": [1.0] * 4},
         "without their attention factor"),
        ("qwen2", {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
                   "qwen2.rope.scaling.original_context_length": 32, "qwen2.rope.scaling.yarn_attn_factor": 1.5}, {},
         "attention factor of 1.5"),
    ],
)  # fmt: skip
def test_what_would_be_run_wrong_is_refused_with_the_reason(
    tmp_path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, list[float]], reason: str
) -> None:
    files = header_only(tmp_path / "model.gguf", architecture, keys, tensors)
    with pytest.raises(LoadFailed, match=reason):
        gguf_config(open_gguf(files))


def test_scales_of_zero_are_none(tmp_path: Path) -> None:
    """As llama.cpp takes them, which has no other way to say that there is none."""
    scales = dict.fromkeys(("attention.scale", "embedding_scale", "residual_scale", "logit_scale"), 0.0)
    keys = {f"granite.{key}": scale for key, scale in scales.items()}
    config = gguf_config(open_gguf(header_only(tmp_path / "model.gguf", "granite", keys)))
    assert (config["attention_multiplier"], config["logits_scaling"]) == (8**-0.5, 1.0)
    assert (config["embedding_multiplier"], config["residual_multiplier"]) == (1.0, 1.0)
    assert (
        gguf_config(open_gguf(header_only(tmp_path / "olmo.gguf", "olmo", {"olmo.attention.clamp_kqv": 0.0})))[
            "clip_qkv"
        ]
        is None
    )


def test_the_models_of_27_billion_parameters_scale_queries_otherwise(tmp_path: Path) -> None:
    """google/gemma-2-27b states 144 with heads of 128, google/gemma-3-27b-it 168."""
    for architecture, layers, hidden, scale in (("gemma2", 46, 4608, 144), ("gemma3", 62, 5376, 168)):
        keys = {"block_count": layers, "embedding_length": hidden, "attention.head_count": 32,
                "attention.key_length": 128, "attention.sliding_window": 1024}  # fmt: skip
        stated = {f"{architecture}.{key}": value for key, value in keys.items()}
        files = header_only(tmp_path / architecture, architecture, stated)
        config = gguf_config(open_gguf(files))
        assert (config["query_pre_attn_scalar"], config["head_dim"]) == (scale, 128)


def test_an_attention_factor_that_follows_from_the_factor_is_no_other(tmp_path: Path) -> None:
    """As allenai/Olmo-3-1025-7B states it: 0.1 ln 8 + 1."""
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_attn_factor": 1.2079441541679836, "attention.sliding_window": 8}  # fmt: skip
    files = header_only(tmp_path / "model.gguf", "olmo2", {f"olmo2.{key}": value for key, value in keys.items()})
    config = gguf_config(open_gguf(files))
    assert config["model_type"] == "olmo3"
    assert config["layer_types"] == ["sliding_attention"]
    assert config["rope_parameters"]["full_attention"]["factor"] == 8.0
    assert config["rope_parameters"]["sliding_attention"]["rope_type"] == "default"
