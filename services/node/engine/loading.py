"""Reads a shard's weights into the modules that it needs, tensor by tensor, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from meshnet.errors import BadFiles, LoadFailed
from meshnet.model import ModelManifest, Quantization
from services.node.core.work import ShardSpec
from services.node.engine.cpu.modules import Scratch
from services.node.engine.cpu.replacing import with_compiled_parts
from services.node.engine.exceptions import adapt, compute_buffers
from services.node.engine.experts import DOWN, GATE_UP, LinearExperts, are_stacked
from services.node.engine.fused import FusedPart, fused, groups_in
from services.node.engine.kernels import TiedHead
from services.node.engine.linear import held_bytes, make_linear
from services.node.engine.precision import compute_dtype
from services.node.engine.shard import Entry, HeldLayer, TorchShard
from services.node.engine.structure import Structure
from services.node.engine.weights import WeightSource
from services.node.files.manifest import NF4_BLOCK


def load_shard(
    spec: ShardSpec,
    structure: Structure,
    source: WeightSource,
    device: torch.device,
    on_bytes: Callable[[int], None],
    half: torch.dtype = torch.bfloat16,
) -> TorchShard:
    """Loads `spec.layers`, `half` being the device's dtype of 16 bits. `on_bytes` hears of the bytes of each part as
    it is loaded. Raises LoadFailed.

    The modules are taken out of `structure`, which is of no use afterwards.
    """
    _check_model(spec.manifest, structure, source)
    loader = _Loader(structure, source, spec.quantization, device, half, on_bytes)
    return TorchShard(
        model_id=spec.manifest.model_id,
        range=spec.layers,
        layers={layer: loader.layer(layer) for layer in spec.layers.layers},
        entry=loader.entry() if spec.layers.start == 0 else None,
        rotary=loader.rotary(),
        hidden_size=spec.manifest.hidden_size,
        vocab_size=spec.manifest.vocab_size,
        context_length=spec.manifest.context_length,
    )


def _check_model(manifest: ModelManifest, structure: Structure, source: WeightSource) -> None:
    """The modules and the files must agree on all tensors of the model: one left out is a model silently wrong."""
    config = structure.config
    modules = (config.num_hidden_layers, config.hidden_size, config.vocab_size)
    if modules != (manifest.num_layers, manifest.hidden_size, manifest.vocab_size):
        raise BadFiles(f"the manifest of model {manifest.model_id!r} is not that of the files here")
    names = set(structure.model.state_dict())
    tied = {f"{structure.head}.weight"} if structure.tied_head else set()
    if missing := sorted(name for name in names - tied if not source.holds(name)):
        raise BadFiles(f"the weight files lack {len(missing)} tensors, among them {', '.join(missing[:3])}")
    if unknown := sorted(source.leftovers(names)):
        raise BadFiles(f"the model has no place for {len(unknown)} tensors, among them {', '.join(unknown[:3])}")


@dataclass(frozen=True, slots=True)
class _Loader:
    structure: Structure
    source: WeightSource
    quantization: Quantization
    device: torch.device
    half: torch.dtype
    on_bytes: Callable[[int], None]
    scratch: Scratch = field(default_factory=Scratch)

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.quantization, self.half)

    def layer(self, index: int) -> HeldLayer:
        name, module = self.structure.layer(index)
        filled = self._fill(name, module, self.quantization)
        filled = with_compiled_parts(filled, self.device, self.dtype, self.scratch)
        return HeldLayer(adapt(filled), self.dtype, self.structure.rotary_kind(index))

    def entry(self) -> Entry:
        """Embedding, norm and head are not quantized."""
        embedding = self._fill_named(self.structure.embedding)
        assert isinstance(embedding.weight, torch.Tensor)
        tied = self.structure.tied_head
        positions = self._fill_named(self.structure.positions) if self.structure.positions else None
        assert positions is None or isinstance(positions, nn.Embedding)
        return Entry(
            embedding=embedding,
            positions=positions,
            norm=with_compiled_parts(self._fill_named(self.structure.norm), self.device, self.dtype, self.scratch),
            head=TiedHead(embedding.weight) if tied else self._fill_named(self.structure.head),
            dtype=self.dtype,
            position_offset=int(getattr(positions, "offset", 0)),
            embedding_scale=self.structure.embedding_scale,
            logit_scale=self.structure.logit_scale,
            logit_softcap=self.structure.logit_softcap,
        )

    def rotary(self) -> nn.Module | None:
        """Made anew on the device: its frequencies are computed, and those of the meta model hold no values."""
        if self.structure.rotary is None:
            return None
        kind = type(self.structure.module(self.structure.rotary))
        with torch.device(self.device):
            module: nn.Module = kind(config=self.structure.config)
        return module.eval()

    def _fill_named(self, name: str) -> nn.Module:
        whole = Quantization.FLOAT32 if self.quantization is Quantization.FLOAT32 else Quantization.BFLOAT16
        return self._fill(name, self.structure.module(name), whole)

    def _fill(self, name: str, module: nn.Module, quantization: Quantization) -> nn.Module:
        """The module with weights; where it is a linear layer itself, another in its place."""
        if isinstance(module, nn.Linear | Conv1D):
            return self._linear(name, module, quantization)
        if are_stacked(module):
            return self._experts(name, module, quantization)
        if quantization is not Quantization.FLOAT32:
            self._fuse(name, module, quantization)
        for child_name, child in list(module.named_children()):
            if isinstance(child, FusedPart):
                continue
            setattr(module, child_name, self._fill(f"{name}.{child_name}", child, quantization))
        for own, parameter in list(module.named_parameters(recurse=False)):
            tensor = self._read(f"{name}.{own}", parameter.shape).to(self.device)
            setattr(module, own, nn.Parameter(tensor, requires_grad=False))
            self.on_bytes(tensor.nbytes)
        compute_buffers(module, self.device)
        if buffers := [own for own, buffer in module.named_buffers(recurse=False) if buffer.is_meta]:
            raise LoadFailed(f"{type(module).__name__} computes {', '.join(buffers)} itself, which is not supported")
        return module

    def _experts(self, name: str, module: nn.Module, quantization: Quantization) -> nn.Module:
        """The stack's experts as linear layers, read one by one."""
        num_experts = len(module.get_parameter(DOWN))
        gate_up, down = (
            [self._expert(f"{name}.{own}", module, own, expert, quantization) for expert in range(num_experts)]
            for own in (GATE_UP, DOWN)
        )
        return LinearExperts(gate_up, down, module._apply_gate)  # type: ignore[arg-type]  # a method, torch says Module

    def _expert(self, name: str, stack: nn.Module, own: str, expert: int, quantization: Quantization) -> nn.Module:
        parameters = dict(stack.named_parameters(recurse=False))
        weight = self._read(name, parameters[own].shape[1:], expert)
        biases = parameters.get(f"{own}_bias")
        bias = None if biases is None else self._read(f"{name}_bias", biases.shape[1:], expert)
        # Those of GPT-OSS are held as [in, out].
        weight = weight.T if getattr(stack, "is_transposed", False) else weight
        linear = make_linear(weight, bias, quantization, self.device, self.half)
        self.on_bytes(held_bytes(linear))
        return linear

    def _linear(self, name: str, module: nn.Module, quantization: Quantization) -> nn.Module:
        weight, bias = self._weight_and_bias(name, module)
        # Conv1D holds [in, out].
        weight = weight.T if isinstance(module, Conv1D) else weight
        linear = make_linear(weight, bias, quantization, self.device, self.half)
        self.on_bytes(held_bytes(linear))
        return linear

    def _fuse(self, name: str, module: nn.Module, quantization: Quantization) -> None:
        """Puts one linear layer in the place of several that have the same input."""
        for names in groups_in(module):
            children = [module.get_submodule(child) for child in names]
            first = children[0]
            assert isinstance(first, nn.Linear)
            if quantization is Quantization.NF4 and first.in_features % NF4_BLOCK:
                # A block of values would have parts of two of them.
                continue
            loaded = [self._weight_and_bias(f"{name}.{own}", child) for own, child in zip(names, children, strict=True)]
            biases = [bias for _, bias in loaded if bias is not None]
            weight = torch.cat([weight for weight, _ in loaded])
            sizes, in_features = [len(weight) for weight, _ in loaded], weight.shape[1]
            del loaded
            bias = torch.cat(biases) if biases else None
            linear = make_linear(weight, bias, quantization, self.device, self.half)
            self.on_bytes(held_bytes(linear))
            for own, part in zip(names, fused(linear, in_features, sizes), strict=True):
                setattr(module, own, part)

    def _weight_and_bias(self, name: str, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Those of a linear layer, as the module has them."""
        shape, bias = module.weight.shape, module.bias
        assert isinstance(shape, torch.Size)
        weight = self._read(f"{name}.weight", shape)
        if bias is None:
            return weight, None
        assert isinstance(bias, torch.Tensor)
        return weight, self._read(f"{name}.bias", bias.shape)

    def _read(self, name: str, shape: torch.Size, expert: int | None = None) -> torch.Tensor:
        if expert is None:
            tensor = self.source.read(name, self.dtype)
        else:
            tensor = self.source.read_expert(name, expert, self.dtype)
        if tensor.shape != shape:
            raise BadFiles(f"tensor {name!r} has the shape {tuple(tensor.shape)}, the config makes it {tuple(shape)}")
        return tensor
