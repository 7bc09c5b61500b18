"""What a model weighs, layer by layer, from the headers of its weight files. Without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from meshnet.errors import LoadFailed
from meshnet.model import LayerRange, ModelManifest, WeightBytes
from meshnet.model_files import ModelFiles
from services.node.core.workspace import predicted_workspaces
from services.node.files.description import Description, describe
from services.node.files.layer_steps import layer_step
from services.node.files.model_config import ModelShape, model_shape
from services.node.files.safetensors_header import TensorHeader

NF4_BLOCK = 64
_SCALE_BYTES = 4
_KV_TENSORS = 2
_KV_VALUE_BYTES = 2

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blk)\.(\d+)\.(.+)")
# Causal masks and rotary frequencies that older checkpoints store, and rotary factors of GGUF files, which are in the
# config: the one and the other is computed.
COMPUTED = re.compile(
    r"(?:\.|^)(?:attn|attention)\.(?:masked_)?bias$|rotary_emb\.inv_freq$|^rope_(?:freqs|factors_long|factors_short)\."
)
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|word_embeddings|wte|embed_in|token_embd)\.weight$")
_HEAD = re.compile(r"^(?:lm_head|embed_out|output)\.weight$")
_KEY_PROJECTION = re.compile(r"(?:self_attn\.k_proj|attn_k)\.weight$")
# What chooses among experts is a matrix and yet not quantized, and so are norms that have weights for each head.
_WHOLE = re.compile(r"(?:^|\.)(?:gate|router|ffn_gate_inp|\w*norm)\.weight$")
# A projection to one value, stored as a vector.
_VECTOR = re.compile(r"(?:^|\.)ffn_gate_inp_shexp\.weight$")
# The same projection of all experts of a layer in one tensor. Nodes take it apart and quantize each.
_EXPERTS = re.compile(r"(?:^|\.)(?:experts\.(?:gate_up_proj|down_proj)|ffn_(?:gate|up|down)_exps\.weight)$")
_MIXTURE = re.compile(r"(?:^|\.)experts\.|_exps\.")
# Stored as [in, out]: the matrices of the one, the experts of the other.
_IN_OUT_MATRICES = "gpt2"
_IN_OUT_EXPERTS = "gpt_oss"


@dataclass(slots=True)
class _Sorted:
    """A model's tensors by the part that they belong to. Layers map the names inside a layer to tensors."""

    layers: dict[int, dict[str, TensorHeader]] = field(default_factory=dict)
    entry: dict[str, TensorHeader] = field(default_factory=dict)


def read_manifest(files: ModelFiles) -> ModelManifest:
    """Describes a model without loading it. Raises LoadFailed, with the reason, if it cannot be served."""
    return manifest_of(files.model_id, describe(files))


def manifest_of(model_id: str, description: Description) -> ModelManifest:
    """What the description makes of the model. Raises LoadFailed, with the reason, if it cannot be served."""
    config = description.config
    shape = model_shape(config)
    parts = _sort(description.tensors, shape)
    _check_layers(parts.layers, shape)
    _check_entry(parts.entry, shape)
    # Whatever the model, GGUF files store matrices as [out, in].
    stored = {**config, "model_type": ""} if description.is_gguf else config
    manifest = ModelManifest(
        model_id=model_id,
        revision=description.revision(),
        architecture=str((config.get("architectures") or [config["model_type"]])[0]),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        layers=tuple(_layer_bytes(parts.layers[layer], stored["model_type"]) for layer in range(shape.num_layers)),
        entry=_total(_plain_bytes(tensor) for tensor in parts.entry.values()),
        kv_bytes_per_token=_KV_TENSORS * shape.kv_heads * shape.head_dim * _KV_VALUE_BYTES,
        kv_scales_per_token=_KV_TENSORS * shape.kv_heads,
        steps=tuple(layer_step(parts.layers[layer], layer, stored, shape) for layer in range(shape.num_layers)),
    )
    return replace(manifest, workspaces=predicted_workspaces(manifest))


def shard_tensors(description: Description, layers: LayerRange) -> frozenset[str]:
    """Stored names of the tensors that a shard is made of: those of its layers, and if it starts at layer 0 those of
    the entry."""
    shape = model_shape(description.config)
    return frozenset(
        name
        for name in description.tensors
        if (place := _place(name, shape)) and (layers.start == 0 if place[0] is None else place[0] in layers)
    )


def _sort(tensors: Mapping[str, TensorHeader], shape: ModelShape) -> _Sorted:
    parts = _Sorted()
    for name, tensor in tensors.items():
        match _place(name, shape):
            case (int(layer), inner):
                parts.layers.setdefault(layer, {})[inner] = tensor
            case (None, _):
                parts.entry[name] = tensor
    return parts


def _place(name: str, shape: ModelShape) -> tuple[int | None, str] | None:
    """The layer of a tensor (None: it is of the entry) and its name there. None: it is not used."""
    if COMPUTED.search(name):
        return None
    if match := _LAYER.search(name):
        return int(match[1]), match[2]
    return None if shape.tied_head and _HEAD.search(name) else (None, name)


def _check_layers(layers: Mapping[int, Mapping[str, TensorHeader]], shape: ModelShape) -> None:
    if set(layers) != set(range(shape.num_layers)):
        strange = sorted(set(layers) ^ set(range(shape.num_layers)))
        raise LoadFailed(
            f"the config names {shape.num_layers} layers, the weight files hold {len(layers)}; "
            f"they differ in layers {', '.join(map(str, strange[:8]))}"
        )
    # Some models have mixtures of experts in some layers only.
    like: dict[bool, int] = {}
    for layer, tensors in sorted(layers.items()):
        first = like.setdefault(any(map(_MIXTURE.search, tensors)), layer)
        if unlike := sorted(set(tensors) ^ set(layers[first])):
            raise LoadFailed(f"layers {first} and {layer} differ in their tensors: {', '.join(unlike[:3])}")
    wanted = shape.kv_heads * shape.head_dim
    for name, tensor in layers[0].items():
        if _KEY_PROJECTION.search(name) and tensor.shape[:1] != (wanted,):
            raise LoadFailed(f"the config's heads make keys of {wanted} values, the weights of {tensor.shape[0]}")


def _check_entry(entry: Mapping[str, TensorHeader], shape: ModelShape) -> None:
    embeddings = [tensor for name, tensor in entry.items() if _EMBEDDING.search(name)]
    if not embeddings:
        raise LoadFailed("the weight files hold no token embedding")
    if any(tensor.shape != (shape.vocab_size, shape.hidden_size) for tensor in embeddings):
        raise LoadFailed(
            f"the config names {shape.vocab_size} tokens of {shape.hidden_size} values, "
            f"the token embedding has the shape {embeddings[0].shape}"
        )
    if not shape.tied_head and not any(_HEAD.search(name) for name in entry):
        raise LoadFailed("the weight files hold no LM head, and the config does not tie it to the embedding")


def _layer_bytes(tensors: Mapping[str, TensorHeader], model_type: str) -> WeightBytes:
    return _total(_tensor_bytes(name, tensor, model_type) for name, tensor in tensors.items())


def _tensor_bytes(name: str, tensor: TensorHeader, model_type: str) -> WeightBytes:
    match tensor.shape:
        case (experts, height, width) if _EXPERTS.search(name):
            rows = width if model_type == _IN_OUT_EXPERTS else height
            return _linear_bytes(experts, rows, height * width)
        case (width,) if _VECTOR.search(name):
            return _linear_bytes(1, 1, width)
        case (height, width) if name.endswith(".weight") and not _WHOLE.search(name):
            return _linear_bytes(1, width if model_type == _IN_OUT_MATRICES else height, height * width)
        case _:
            return _plain_bytes(tensor)


def _linear_bytes(count: int, rows: int, numel: int) -> WeightBytes:
    """So many linear weights, each of `rows` outputs and `numel` values."""
    return WeightBytes(
        bfloat16=2 * count * numel,
        int8=count * (numel + _SCALE_BYTES * rows),
        nf4=count * (-(-numel // 2) + _SCALE_BYTES * -(-numel // NF4_BLOCK)),
        float32=4 * count * numel,
    )


def _plain_bytes(tensor: TensorHeader) -> WeightBytes:
    return WeightBytes(2 * tensor.numel, 2 * tensor.numel, 2 * tensor.numel, 4 * tensor.numel)


def _total(sizes: Iterable[WeightBytes]) -> WeightBytes:
    sizes = list(sizes)
    return WeightBytes(
        bfloat16=sum(size.bfloat16 for size in sizes),
        int8=sum(size.int8 for size in sizes),
        nf4=sum(size.nf4 for size in sizes),
        float32=sum(size.float32 for size in sizes),
    )
