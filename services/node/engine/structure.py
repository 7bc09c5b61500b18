"""Where the parts of a decoder are, found by structure on a model without weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from meshnet.errors import LoadFailed
from services.node.engine import attention, exceptions


@dataclass(frozen=True, slots=True)
class Structure:
    """A model on the meta device and the names of its parts in it. Of `rotary` and `positions` one is there.

    `base` is what checkpoints of the model without its head leave out of names.
    """

    model: Any
    config: Any
    base: str
    layers: str
    embedding: str
    norm: str
    head: str
    rotary: str | None
    positions: str | None

    def module(self, name: str) -> nn.Module:
        found: nn.Module = self.model.get_submodule(name)
        return found

    def layer(self, index: int) -> tuple[str, nn.Module]:
        """A layer's name and the layer itself, which knows its index."""
        name = f"{self.layers}.{index}"
        return name, self.module(name)

    def rotary_kind(self, index: int) -> str | None:
        """Of which kind a layer's rotary embedding is, in models that have several."""
        kinds = getattr(self.module(self.rotary), "rope_type", None) if self.rotary else None
        return str(self.config.layer_types[index]) if isinstance(kinds, dict) else None

    @property
    def logit_softcap(self) -> float | None:
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return None if softcap is None else float(softcap)

    @property
    def embedding_scale(self) -> float:
        """Granite's; Gemma's embedding scales itself."""
        return float(getattr(self.config, "embedding_multiplier", None) or 1.0)

    @property
    def logit_scale(self) -> float:
        """Cohere multiplies by it, Granite divides."""
        divisor = float(getattr(self.config, "logits_scaling", None) or 1.0)
        return float(getattr(self.config, "logit_scale", None) or 1.0) / divisor

    @property
    def tied_head(self) -> bool:
        return bool(self.config.tie_word_embeddings)


def find_structure(config: Any) -> Structure:
    """Raises LoadFailed for a model that is not embedding, layers, norm and head, and nothing else."""
    model = _build(config)
    names = {id(module): name for name, module in model.named_modules()}
    base = model.base_model
    if base is model:
        raise LoadFailed(f"{type(model).__name__} has no base model")
    trunk = _trunk(base)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [part for part in trunk.children() if isinstance(part, nn.ModuleList)]
    if len(layers) != 1 or len(layers[0]) != config.num_hidden_layers or embedding is None or head is None:
        raise LoadFailed(f"{type(model).__name__} is not an embedding, one list of layers and a head")
    rest = [part for part in trunk.children() if part is not layers[0] and part is not embedding]
    norm = _only(model, "final norm", [part for part in rest if _is_norm(part, config.hidden_size)])
    rotary: list[nn.Module] = [part for part in rest if _is_rotary(part)]
    positions: list[nn.Module] = [part for part in rest if isinstance(part, nn.Embedding)]
    positional = _only(model, "position embedding", rotary + positions)
    _refuse_strangers(model, [part for part in rest if part is not norm and part is not positional])
    return Structure(
        model=model,
        config=config,
        base=names[id(base)],
        layers=names[id(layers[0])],
        embedding=names[id(embedding)],
        norm=names[id(norm)],
        head=names[id(head)],
        rotary=names[id(positional)] if rotary else None,
        positions=names[id(positional)] if positions else None,
    )


def _build(config: Any) -> Any:
    # from_config writes the choice of attention into the config that it is given.
    config = copy.deepcopy(config)
    attention.register()
    exceptions.register(config.model_type)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention.ATTENTION).eval()
    # Whatever a model's constructor does with a config that does not fit.
    except Exception as error:
        raise LoadFailed(f"no model can be built from the config: {error}") from error


def _trunk(base: nn.Module) -> nn.Module:
    """The part of the base model that holds embedding and layers: itself, or the only part that it has."""
    parts = list(base.children())
    return _trunk(parts[0]) if len(parts) == 1 and not isinstance(parts[0], nn.ModuleList) else base


def _is_norm(part: nn.Module, hidden_size: int) -> bool:
    """One with a weight a channel, or one without weights, which says what it normalizes."""
    weight = getattr(part, "weight", None)
    if weight is None:
        return getattr(part, "normalized_shape", None) == (hidden_size,)
    return isinstance(weight, torch.Tensor) and tuple(weight.shape) == (hidden_size,)


def _is_rotary(part: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in part.named_buffers(recurse=False))


def _only(model: nn.Module, role: str, found: list[nn.Module]) -> nn.Module:
    if len(found) != 1:
        raise LoadFailed(f"{type(model).__name__} has {len(found)} parts that look like its {role}, not one")
    return found[0]


def _refuse_strangers(model: Any, parts: list[nn.Module]) -> None:
    strangers = [part for part in parts if not isinstance(part, nn.Dropout)]
    outside = [part for part in model.children() if part not in (model.base_model, model.get_output_embeddings())]
    if strangers or outside:
        names = ", ".join(type(part).__name__ for part in strangers + outside)
        raise LoadFailed(f"{type(model).__name__} has parts that are not supported: {names}")
