"""A stage built on plain autograd: what the engine's tests hold against real split stages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class _Graph:
    """One microbatch between its forward and its weight gradients."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    grads: list[Tensor | None]


class ReferenceStage:
    """Runs F, I and W as separate autograd calls over one graph."""

    def __init__(self, module: nn.Module, args: Sequence[Tensor], *, index: int = 0) -> None:
        self.index = index
        self.gradients: dict[str, Tensor] = {}
        self._module = module
        self._wanted = [arg.requires_grad for arg in args]
        self._graphs: dict[int, _Graph] = {}
        self._args = args
        self._outputs = outputs = _flat(copy.deepcopy(module)(*args))
        self.output_specs = [(out.shape, out.dtype, out.requires_grad) for out in outputs]

    def inputs_given(self, come: Sequence[bool]) -> list[bool]:
        pairs = zip(self._outputs, come, strict=True)
        grads = [torch.zeros_like(out) if comes else None for out, comes in pairs]
        wanted = [arg for arg in self._args if arg.requires_grad]
        result = iter(self._grad(_Graph([], self._outputs, grads), wanted))
        return [arg.requires_grad and next(result) is not None for arg in self._args]

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        local = [
            x.detach().requires_grad_(wanted)
            for x, wanted in zip(inputs, self._wanted, strict=True)
        ]
        inputs.clear()
        with torch.enable_grad():
            outputs = _flat(self._module(*local))
        self._graphs[microbatch] = _Graph(local, outputs, [])
        return [output.detach() for output in outputs]

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        graph = self._graphs[microbatch]
        graph.grads = list(output_grads)
        output_grads.clear()
        wanted = [x for x in graph.inputs if x.requires_grad]
        result = iter(self._grad(graph, wanted))
        return [next(result) if x.requires_grad else None for x in graph.inputs]

    def backward_weight(self, microbatch: int) -> None:
        named = [(n, p) for n, p in self._module.named_parameters() if p.requires_grad]
        grads = self._grad(self._graphs.pop(microbatch), [p for _, p in named])
        for (name, _), grad in zip(named, grads, strict=True):
            if grad is not None:
                earlier = self.gradients.get(name)
                self.gradients[name] = grad if earlier is None else earlier + grad

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        grads = self.backward_input(microbatch, output_grads)
        self.backward_weight(microbatch)
        return grads

    def publish(self) -> None:
        parameters = dict(self._module.named_parameters())
        for name, grad in self.gradients.items():
            parameter = parameters[name]
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self.gradients = {}

    def _grad(self, graph: _Graph, wanted: list[Tensor]) -> Sequence[Tensor | None]:
        pairs = [
            (out, grad)
            for out, grad in zip(graph.outputs, graph.grads, strict=True)
            if out.requires_grad and grad is not None
        ]
        if not wanted or not pairs:
            return [None] * len(wanted)
        outputs, grads = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)


def _flat(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
