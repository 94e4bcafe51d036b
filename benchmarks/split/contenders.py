"""Ways to run one microbatch, action by action: plain autograd, autosplit, torch's eager split."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch._functorch.config  # no public switch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

# Private in torch, and the subject of a comparison.
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import autosplit
from autosplit.backends.backend import BACKENDS

from .models import Subject

Forward = Callable[[Tensor], Tensor]
ACTIONS = ("F", "I", "W")
Around = Callable[[str], AbstractContextManager[object]]


class Contender(Protocol):
    """Runs the three actions of one microbatch; keeps between them what it must and no more.

    The caller hands its tensors over and drops them, as a pipeline does when they are sent.
    """

    def forward(self, x: Tensor) -> Tensor:
        """F: the output, without history."""

    def backward_input(self, grad: Tensor) -> Tensor | None:
        """I, or the whole backward where nothing is split: the input's gradient."""

    def backward_weight(self) -> None:
        """W, if the backward left any."""

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters, as accumulated so far."""

    def clear(self) -> None:
        """Forget the gradients."""


def microbatch(
    contender: Contender, subject: Subject, around: Around = lambda action: nullcontext()
) -> None:
    """F, I and W, each within what ``around`` gives for it. Leaves the gradients.

    The input and the gradient of the output are made inside, as if they had just been
    received, and results are dropped inside, as if they had been sent on.
    """
    with around("F"):
        contender.forward(subject.x.clone())
    with around("I"):
        contender.backward_input(subject.grad.clone())
    with around("W"):
        contender.backward_weight()


class Autograd:
    """Forward and backward as everybody runs them."""

    def __init__(self, module: nn.Module, run: Forward | None = None) -> None:
        self._module = module
        self._run = module if run is None else run
        self._flight: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        y = self._run(x)
        self._flight = x, get_gradient_edge(y)  # not y: it is the next stage's
        return y.detach()

    def backward_input(self, grad: Tensor) -> Tensor | None:
        (x, edge), self._flight = self._flight, None
        torch.autograd.backward((edge,), (grad,))
        dx: Tensor | None = x.grad
        return dx

    def backward_weight(self) -> None:
        pass

    def gradients(self) -> dict[str, Tensor]:
        named = self._module.named_parameters()
        return {name: each.grad for name, each in named if each.grad is not None}

    def clear(self) -> None:
        self._module.zero_grad(set_to_none=True)


class TorchSplit(Autograd):
    """``torch.distributed.pipelining``'s eager split, as its zero-bubble schedules call it."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        y = self._run(x)
        self._flight = x, y
        return y.detach()

    def backward_input(self, grad: Tensor) -> Tensor | None:
        (x, y), self._flight = self._flight, None
        (dx,), self._groups = stage_backward_input([y], [grad], [x], self._module.parameters())
        return dx

    def backward_weight(self) -> None:
        groups, self._groups = self._groups, []
        stage_backward_weight(self._module.parameters(), groups)


class Autosplit:
    """The functional face."""

    def __init__(self, module: nn.Module, x: Tensor, backend: str, memory: str | int) -> None:
        example = x.detach().clone().requires_grad_()
        self.stage = autosplit.Stage(module, [example], backend=backend, memory=memory)

    def forward(self, x: Tensor) -> Tensor:
        inputs = [x]
        del x
        (y,) = self.stage.forward(0, inputs)
        return y

    def backward_input(self, grad: Tensor) -> Tensor | None:
        grads: list[Tensor | None] = [grad]
        del grad
        return self.stage.backward_input(0, grads)[0]

    def backward_weight(self) -> None:
        self.stage.backward_weight(0)

    def gradients(self) -> dict[str, Tensor]:
        return dict(self.stage.gradients)

    def clear(self) -> None:
        self.stage.reset()


def eager(subject: Subject, memory: str | int = "balanced") -> dict[str, Callable[[], Contender]]:
    """What runs operator by operator; each is built when it is its turn."""
    module = subject.module
    return {
        "autograd": lambda: Autograd(module),
        "autosplit": lambda: Autosplit(module, subject.x, "eager", memory),
        "torch split": lambda: TorchSplit(module),
    }


def compiled(subject: Subject) -> dict[str, Callable[[], Contender]]:
    """What Inductor compiles, torch.compile's ordinary step first; torch's split runs on the same
    compiled code, and on code that may not reuse the memory of what the forward saved.
    """
    module = subject.module

    def split(backend: str) -> Callable[[], Contender]:
        return lambda: Autosplit(module, subject.x, backend, "balanced")

    def undonated() -> Contender:
        # The first forward compiles the backward too.
        with torch._functorch.config.patch(donated_buffer=False):
            # A contender must not run what was compiled for another, but Dynamo keeps that by
            # function and by backend. An option, though this is the default, makes another one.
            compiled = torch.compile(module, options={"trace.enabled": False})
            contender = TorchSplit(module, compiled)
            contender.forward(subject.x.clone())
        return contender

    on_device = () if subject.x.device.type == "cpu" else tuple(BACKENDS)
    more = {name: split(name) for name in on_device if name not in ("eager", "inductor")}
    return {
        "torch.compile": lambda: Autograd(module, torch.compile(module)),
        "autosplit": split("inductor"),
        **{f"autosplit {name}": make for name, make in more.items()},
        "torch split": lambda: TorchSplit(module, torch.compile(module)),
        "torch split, donated_buffer=False": undonated,
    }
