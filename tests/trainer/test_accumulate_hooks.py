"""Hooks that wait for gradients in a trainer are called once a step, on whole gradients."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from autosplit import PipelineTrainer


def test_an_optimizer_in_the_backward() -> None:
    modules = {at: nn.Linear(4, 4) for at in range(2)}
    plain = copy.deepcopy(modules)
    calls: list[Tensor] = []
    nodes: list[Node] = []
    seen: list[Tensor] = []
    expected: list[Tensor] = []

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None
        calls.append(parameter)

    for module in modules.values():
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
            nodes.append(get_gradient_edge(parameter).node)
            nodes[-1].register_hook(lambda _, grads: seen.extend(grads))
    with PipelineTrainer(
        modules.__getitem__, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, 0.1),
        stages=2, microbatches=2, ranks=1, schedule="zb-h1", max_grad_norm=1.0,
    ) as trainer:  # fmt: skip
        for _ in range(2):
            x, y = torch.randn(4, 4), torch.randn(4, 4)
            trainer.step(x, target=y)
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (nn.functional.mse_loss(plain[1](plain[0](a)), b) / 2).backward()
            with torch.no_grad():
                for parameter in (p for module in plain.values() for p in module.parameters()):
                    expected.append(parameter.grad)
                    step(parameter)
    assert len(calls) == 2 * 2 * 4
    assert len(seen) == len(expected)
    assert all(map(torch.equal, seen, expected))
    for at, module in modules.items():
        assert all(map(torch.equal, module.parameters(), plain[at].parameters()))
