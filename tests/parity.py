"""Greedy parity with the unsharded model in transformers: one rule, for all tests that compare emitted tokens.

An emitted token is right if it is the reference's argmax, or if its reference logit lies within two bfloat16 steps
of the largest (kernels differ in the order of their sums, and so in the last bits). Then the reference follows the
emitted token, so that one such flip does not condemn what comes after it.

The reference rounds too, and may move two words against each other by more than two steps. So where it computes in
bfloat16, a token that it condemns is judged once more by the same weights in float32: it is right if it is no further
from the largest there than bfloat16 moves the reference's own logits in that place (ADR 23).

The reference runs as transformers' generate() does: the prompt in one pass, then each token on the KV cache of those
before it. In one pass over all of them it takes other kernels, and where bfloat16 leaves two words even, their logits
move against each other by more than the two steps.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from meshnet.model import LayerRange, Quantization
from services.node.engine.linear import make_linear

TOLERATED_STEPS = 2.0
_MANTISSA_BITS = 7


@dataclass(frozen=True, slots=True)
class ParityReport:
    """`flips`: emitted tokens that are not the reference's argmax; `worst_gap_in_steps`: the largest shortfall."""

    flips: int
    worst_gap_in_steps: float


class Reference:
    """The unsharded model, from a Hugging Face directory or from a GGUF file."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model: Any = _load_gguf(path, dtype) if path.suffix == ".gguf" else _load_directory(path, dtype)
        self.model.eval()
        self._is_as_stored = True

    @functools.cached_property
    def exact(self) -> Reference | None:
        """The same weights, rounded no further than to bfloat16, in float32. None: the model is that, or quantized."""
        if self.model.dtype is not torch.bfloat16 or not self._is_as_stored:
            return None
        exact = copy.copy(self)
        exact.model = copy.deepcopy(self.model).float()
        return exact

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """`[tokens, vocab]` in the model's dtype."""
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        logits: torch.Tensor = self.model(ids, use_cache=False).logits[0]
        return logits

    @torch.inference_mode()
    def logits_in_steps(self, steps: Sequence[Sequence[int]]) -> torch.Tensor:
        """`[tokens, vocab]` of steps that follow on each other, each run on the KV cache of those before it.

        LLM.int8 takes the channels that are large in any row of a step out of int8: there too it matters what is run
        in one step.
        """
        cache, parts = DynamicCache(config=self.model.config), []
        # It was renamed, and the old name warns.
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        for step in steps:
            ids = torch.tensor([list(step)], device=self.model.device)
            parts.append(self.model(ids, use_cache=True, **{name: cache}).logits[0])
        return torch.cat(parts)

    def quantize(self, layers: LayerRange, quantization: Quantization) -> None:
        """Stores the linear layers in these layers of the model as a node does."""
        self._is_as_stored = False
        for index in layers.layers:
            layer = self.model.get_submodule(f"model.layers.{index}")
            linears = [(name, module) for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)]
            for name, module in linears:
                weight, bias = module.weight.detach(), module.bias
                layer.set_submodule(name, make_linear(weight, bias, quantization, torch.device("cpu")))

    def check(
        self, prompt_ids: Sequence[int], emitted_ids: Sequence[int], tolerated_steps: float = TOLERATED_STEPS
    ) -> ParityReport:
        """Asserts that each emitted token is right after the prompt and the tokens emitted before it."""
        return check_emitted(
            self._following(prompt_ids, emitted_ids),
            emitted_ids,
            tolerated_steps,
            lambda: self.exact._following(prompt_ids, emitted_ids) if self.exact else None,
        )

    def _following(self, prompt_ids: Sequence[int], emitted_ids: Sequence[int]) -> torch.Tensor:
        """`[emitted, vocab]`: logits in the place of each emitted token."""
        steps = [prompt_ids, *([token] for token in emitted_ids[:-1])]
        return self.logits_in_steps(steps)[len(prompt_ids) - 1 :]


def check_emitted(
    logits: torch.Tensor,
    emitted_ids: Sequence[int],
    tolerated_steps: float = TOLERATED_STEPS,
    exact_logits: Callable[[], torch.Tensor | None] = lambda: None,
) -> ParityReport:
    """Asserts that each token is right by the reference's logits `[tokens, vocab]` in its place, or by exact ones."""
    assert emitted_ids, "nothing was emitted"
    gaps = [gap_in_steps(row, token) for row, token in zip(logits.float(), emitted_ids, strict=True)]
    exact = exact_logits() if max(gaps) > tolerated_steps else None
    for index, (token, gap) in enumerate(zip(emitted_ids, gaps, strict=True)):
        exactly = "" if exact is None else _condemned(logits[index].float(), exact[index], token)
        assert gap <= tolerated_steps or (exact is not None and not exactly), (
            f"token {index} is {token}, the reference's is {int(logits[index].argmax())}, "
            f"{gap:.1f} bfloat16 steps above{exactly}: {list(emitted_ids)}"
        )
    return ParityReport(sum(gap > 0 for gap in gaps), max(gaps))


def _condemned(rounded: torch.Tensor, exact: torch.Tensor, token: int) -> str:
    """Why a token is wrong by exact logits `[vocab]` too, of which `rounded` are what bfloat16 makes. Empty: it is not.

    Two logits that are each moved by so much, root mean square, move against each other by the square root of two of
    it, and twice that is within the bounds of chance.
    """
    moved = float((rounded - exact).square().mean().sqrt())
    gap, tolerated = float(exact.max() - exact[token]), 2 * math.sqrt(2) * moved
    return "" if gap <= tolerated else f", and {gap:.3f} exactly, where bfloat16 moves logits by {moved:.3f}"


def gap_in_steps(logits: torch.Tensor, token: int) -> float:
    """How far a token's logit is below the largest, in steps between bfloat16 values of the largest's size."""
    largest = float(logits.max())
    return (largest - float(logits[token])) / bfloat16_step(largest)


def bfloat16_step(value: float) -> float:
    """Between bfloat16 values of this size."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1 - _MANTISSA_BITS)


def _load_directory(path: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def _load_gguf(path: Path, dtype: torch.dtype) -> Any:
    """What from_pretrained(gguf_file=...) does, which also asks for a package that nothing else here needs."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=dtype)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model
