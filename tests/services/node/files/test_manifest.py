"""Manifests, and the files and configs that must be refused with a reason."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshnet.errors import LoadFailed
from meshnet.model_files import ModelFiles
from services.node.files.manifest import read_manifest

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 50, 3
KV = 2 * 16
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LAYER_SHAPES = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (KV, HIDDEN),
    "self_attn.v_proj.weight": (KV, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
ORIGINAL = "original_max_position_embeddings"
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
    **{f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in LAYER_SHAPES.items()},
}


def safetensors(shapes: dict[str, tuple[int, ...]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


def save(
    path: Path, config: dict[str, Any] | None = None, shapes: dict[str, tuple[int, ...]] | None = None
) -> ModelFiles:
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (path / "model.safetensors").write_bytes(safetensors(SHAPES if shapes is None else shapes))
    return ModelFiles("small", path)


def test_bytes_at_each_quantization(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path))
    linears = [shape for shape in LAYER_SHAPES.values() if len(shape) == 2]
    values, rows = sum(out * inner for out, inner in linears), sum(out for out, _ in linears)
    layer = manifest.layers[0]
    assert manifest.layers == (layer,) * LAYERS
    assert layer.bfloat16 == 2 * (values + 2 * HIDDEN)
    assert layer.float32 == 2 * layer.bfloat16
    assert layer.int8 == values + 4 * rows + 2 * 2 * HIDDEN
    assert layer.nf4 == values // 2 + 4 * values // 64 + 2 * 2 * HIDDEN
    assert manifest.entry.bfloat16 == manifest.entry.int8 == manifest.entry.nf4 == 2 * (2 * VOCAB + 1) * HIDDEN
    assert manifest.kv_bytes_per_token == 2 * 2 * 16 * 2
    assert (manifest.architecture, manifest.context_length) == ("LlamaForCausalLM", 256)


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    config = CONFIG | {"tie_word_embeddings": True}
    stored = read_manifest(save(tmp_path / "with", config))
    absent = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    assert read_manifest(save(tmp_path / "without", config, absent)).entry == stored.entry
    assert stored.entry.bfloat16 == 2 * (VOCAB + 1) * HIDDEN


def test_the_models_own_head_dim_counts(tmp_path: Path) -> None:
    shapes = SHAPES | {name: (2 * 40, HIDDEN) for name in SHAPES if "k_proj" in name}
    assert read_manifest(save(tmp_path, CONFIG | {"head_dim": 40}, shapes)).kv_bytes_per_token == 2 * 2 * 40 * 2


def test_a_model_whose_rotary_embedding_changes_is_served_up_to_there(tmp_path: Path) -> None:
    for stated in ({"rope_scaling": {"type": "longrope", ORIGINAL: 64}}, {"rope_scaling": LONGROPE, ORIGINAL: 64}):
        assert read_manifest(save(tmp_path, CONFIG | stated)).context_length == 64
    with pytest.raises(LoadFailed, match=f"{ORIGINAL} as None"):
        read_manifest(save(tmp_path, CONFIG | {"rope_scaling": LONGROPE}))


def test_layers_with_experts_and_without_are_weighed_each(tmp_path: Path) -> None:
    """Routers are matrices that are not quantized, and experts weigh the same one by one and stacked."""
    mixture = {"mlp.gate.weight": (4, HIDDEN)}
    single = {
        f"mlp.experts.{expert}.{name}_proj.weight": (INNER, HIDDEN) for expert in range(4) for name in ("gate", "up")
    }
    stacked = {"mlp.experts.gate_up_proj": (4, 2 * INNER, HIDDEN)}
    weighed = []
    for experts in (single, stacked):
        extra = {f"model.layers.1.{name}": shape for name, shape in (mixture | experts).items()}
        weighed.append(read_manifest(save(tmp_path, None, SHAPES | extra)).layers)
    assert weighed[0] == weighed[1]
    dense, mixed, last = weighed[0]
    values, rows = 8 * INNER * HIDDEN, 8 * INNER
    assert dense == last
    assert mixed.int8 - dense.int8 == values + 4 * rows + 2 * 4 * HIDDEN
    assert mixed.nf4 - dense.nf4 == values // 2 + 4 * values // 64 + 2 * 4 * HIDDEN


def test_the_revision_is_of_the_content_not_of_the_files(tmp_path: Path) -> None:
    for name in ("one", "several", "other-config", "other-tensors"):
        (tmp_path / name).mkdir()
    one = read_manifest(save(tmp_path / "one")).revision
    several = save(tmp_path / "several", {"_name_or_path": "/somewhere", **dict(reversed(CONFIG.items()))})
    (several.path / "model.safetensors").unlink()
    parts = [dict(list(SHAPES.items())[::2]), dict(list(SHAPES.items())[1::2])]
    for index, part in enumerate(parts):
        (several.path / f"part-{index}.safetensors").write_bytes(safetensors(part))
    weight_map = {name: f"part-{index}.safetensors" for index, part in enumerate(parts) for name in part}
    (several.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_manifest(several).revision == one
    assert read_manifest(save(tmp_path / "other-config", CONFIG | {"rope_theta": 5.0})).revision != one
    biased = SHAPES | {f"model.layers.{layer}.self_attn.o_proj.bias": (HIDDEN,) for layer in range(LAYERS)}
    assert read_manifest(save(tmp_path / "other-tensors", None, biased)).revision != one


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"model_type": "mamba"}, "model type 'mamba' .*state-space"),
        ({"model_type": None}, "model type None .*never compared"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (
            {"rope_parameters": {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}},
            "differs between layers",
        ),
        ({"rope_scaling": "linear"}, "rotary"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type 'linear_attention'"),
        ({"use_bidirectional_attention": True}, "after them"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "opt", "word_embed_proj_dim": 32}, "another width"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "no final norm"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "more than text"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "state-space"),
        ({"model_type": "qwen3_next"}, "state-space"),
        ({"model_type": "somebodys", "ssm_state_size": 16}, "state-space"),
        ({"model_type": "cohere2"}, "never compared"),
        ({"model_type": "mistral", "sliding_window": 32}, "^$"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.LlamaForCausalLM"}}, "^$"),
        ({"hidden_size": None}, "hidden_size as None"),
        ({"num_hidden_layers": -3}, "num_hidden_layers as -3"),
        ({"vocab_size": "many"}, "vocab_size as 'many'"),
        ({"max_position_embeddings": True}, "max_position_embeddings as True"),
        ({"num_hidden_layers": 5}, "5 layers, the weight files hold 3"),
        ({"vocab_size": 51}, "token embedding has the shape"),
        ({"num_key_value_heads": 4}, "keys of 64 values, the weights of 32"),
    ],
)
def test_configs_that_cannot_be_run_are_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    files = save(tmp_path, CONFIG | changes)
    if reason == "^$":
        assert read_manifest(files).num_layers == LAYERS
        return
    with pytest.raises(LoadFailed, match=reason):
        read_manifest(files)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("model.embed_tokens.weight", "no token embedding"),
        ("lm_head.weight", "no LM head"),
        ("model.layers.1.mlp.up_proj.weight", r"layers 0 and 1 differ .*mlp\.up_proj"),
    ],
)
def test_missing_tensors_are_named(tmp_path: Path, missing: str, reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        read_manifest(save(tmp_path, None, {name: shape for name, shape in SHAPES.items() if name != missing}))


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(16)


def tensor(dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16)) -> bytes:
    return header(json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2\3",
        header(b"{}", 1 << 63),
        header(b"{}", 100_000_001),
        header(b"{}", 0),
        header(b"{} x"),
        header(b"[1]"),
        header(b"[" * 100_000),
        header(b"\xff\xfe"),
        header(b'{"a": 1}'),
        header(b'{"a": {"dtype": "F32"}}'),
        tensor(dtype="F99"),
        tensor(shape=[-2, -2]),
        tensor(shape=[2.0, 2]),
        tensor(shape=[2, 3]),
        tensor(offsets=[0, 17]),
        tensor(offsets=[8, 24]),
        tensor(offsets=[-16, 0]),
        tensor(offsets=[16, 0]),
    ],
)
def test_broken_safetensors_files_are_refused(tmp_path: Path, content: bytes) -> None:
    files = save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadFailed, match=r"model\.safetensors"):
        read_manifest(files)


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../a"}}', '{"weight_map": {"a": "gone"}}',
     '{"weight_map": {"a": "model.safetensors"}}', '{"weight_map": {"a": 3}}'],
)  # fmt: skip
def test_broken_indexes_are_refused(tmp_path: Path, index: str) -> None:
    files = save(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(LoadFailed):
        read_manifest(files)


@pytest.mark.parametrize("config", ["", "[]", "{", "[" * 100_000])
def test_broken_configs_are_refused(tmp_path: Path, config: str) -> None:
    files = save(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(LoadFailed, match=r"config\.json"):
        read_manifest(files)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(LoadFailed, match="neither"):
        read_manifest(ModelFiles("small", tmp_path))


@pytest.mark.parametrize("length", [0, 3, 4, 24, 100, 5_000, 1_000_000, 3_000_000])
def test_cut_gguf_files_are_refused(tmp_path: Path, smollm2_gguf: Path, length: int) -> None:
    file = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as whole:
        file.write_bytes(whole.read(length))
    with pytest.raises(LoadFailed, match="small"):
        read_manifest(ModelFiles("small", file))


def test_reading_a_manifest_does_not_import_torch(tmp_path: Path, smollm2_gguf: Path) -> None:
    save(tmp_path)
    code = (
        "import sys; from pathlib import Path; from meshnet.model_files import ModelFiles\n"
        "from services.node.files.manifest import read_manifest\n"
        "for path in sys.argv[1:]: read_manifest(ModelFiles('m', Path(path)))\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(smollm2_gguf)], check=True, timeout=120)
