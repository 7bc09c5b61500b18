"""Rotary embeddings as GGUF files state them, in the terms of a Hugging Face config. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshnet.errors import BadFiles, LoadFailed
from services.node.files.gguf_facts import Facts

# What llama.cpp takes where a file does not say.
_DEFAULT_BASE = 10_000.0
_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
# Two roundings to float32 of the same attention factor.
_SAME = 1e-5


def rotary_parameters(facts: Facts, head_dim: int, partial: bool) -> dict[str, object]:
    """`partial`: not all values of a head need be rotated. Raises LoadFailed if it is not known how to rotate."""
    dimensions = facts.size("rope.dimension_count") if facts.value("rope.dimension_count") else head_dim
    parameters: dict[str, object] = {"rope_theta": facts.number("rope.freq_base", _DEFAULT_BASE)}
    if partial:
        parameters["partial_rotary_factor"] = fraction = dimensions / head_dim
        if int(head_dim * fraction) != dimensions:
            raise LoadFailed(f"rotary embeddings of {dimensions} of {head_dim} values are not supported")
    elif dimensions != head_dim:
        raise LoadFailed(
            f"rotary embeddings of {dimensions} of {head_dim} values are not supported for GGUF files of architecture "
            f"{facts.architecture!r}"
        )
    scaling = _scaling(facts, dimensions)
    # Where Phi-3's config has it, of which the config class has a default.
    original = {_ORIGINAL_CONTEXT: scaling[_ORIGINAL_CONTEXT]} if _LONG in facts.tensors else {}
    return {"rope_parameters": parameters | scaling, **original}


def rotary_parameters_by_layer_type(facts: Facts, sliding_base: float) -> dict[str, object]:
    """Layers with a window rotate without scaling, and by a base of their own if the file states it."""
    parameters = {"rope_theta": facts.number("rope.freq_base", _DEFAULT_BASE), **_scaling(facts, facts.head_dim())}
    if parameters["rope_type"] == "longrope":
        raise LoadFailed("rotary factors for models with sliding windows are not supported")
    sliding = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", sliding_base)}
    return {"rope_parameters": {"full_attention": parameters, "sliding_attention": sliding}}


def stated_factors(config: Mapping[str, Any]) -> dict[str, list[float]]:
    """The values of rotary factors that went into a config, by the names of their tensors."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or "long_factor" not in parameters:
        return {}
    long, short = parameters["long_factor"], parameters.get("short_factor")
    return {_FREQUENCIES: long, _LONG: long, _SHORT: short or []}


def _scaling(facts: Facts, dimensions: int) -> dict[str, object]:
    kind = facts.value("rope.scaling.type") or "none"
    tables = {_FREQUENCIES, _LONG, _SHORT} & facts.tensors.keys()
    if tables:
        if kind not in ("none", "longrope"):
            raise LoadFailed(f"rotary factors beside scaling of type {kind!r} are not supported")
        return _factors(facts, tables, dimensions // 2)
    match kind:
        case "none":
            return {"rope_type": "default"}
        case "linear":
            return {"rope_type": "linear", "factor": facts.number("rope.scaling.factor", 1.0)}
        case "yarn":
            return _yarn(facts)
    raise LoadFailed(f"GGUF files with rotary embeddings scaled by {kind!r} are not supported")


def _factors(facts: Facts, tables: set[str], count: int) -> dict[str, object]:
    """Each frequency divided by a factor of its own: what "longrope" does, whatever the factors were made by.

    Files of Llama 3 hold the factors, and not the parameters that these follow from.
    """
    if tables == {_FREQUENCIES}:
        long = short = facts.factors(_FREQUENCIES, count)
        attention_factor, original = 1.0, facts.size("context_length")
    elif tables == {_LONG, _SHORT}:
        long, short = facts.factors(_LONG, count), facts.factors(_SHORT, count)
        if facts.value("rope.scaling.attn_factor") is None:
            raise BadFiles("the GGUF file has rotary factors without their attention factor")
        attention_factor = facts.number("rope.scaling.attn_factor", 1.0)
        original = facts.size("rope.scaling.original_context_length")
    else:
        raise LoadFailed(f"GGUF files with rotary factors in {', '.join(sorted(tables))} alone are not supported")
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": attention_factor,
        _ORIGINAL_CONTEXT: original,
    }


def _yarn(facts: Facts) -> dict[str, object]:
    factor = facts.number("rope.scaling.factor", 1.0)
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    # Converters write a config's attention factor there, which llama.cpp takes for a part of it: unless it is that
    # which follows from the factor, it is not known what is meant.
    stated = facts.number("rope.scaling.yarn_attn_factor", 1.0)
    if not any(math.isclose(stated, known, rel_tol=_SAME) for known in (1.0, usual)):
        raise LoadFailed(f"YaRN with an attention factor of {stated} in GGUF files is not supported")
    parameters: dict[str, object] = {
        "rope_type": "yarn",
        "factor": factor,
        _ORIGINAL_CONTEXT: facts.size("rope.scaling.original_context_length"),
        "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    # The one model whose ramp does not begin and end at whole dimensions; no file says so.
    return parameters | ({"truncate": False} if facts.architecture == "gpt-oss" else {})
