"""Training loops in which hooks on parameters use gradients: optimizers inside ``backward()``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit.errors import SplitError
from tests.autograd.faces import FACES, Net, model_for
from tests.gradients import assert_same_gradients
from tests.semantics.against_autograd import assert_alike


def optimizers_in_backward(model: nn.Module) -> None:
    """As torch's tutorial has it."""
    optimizers = {p: torch.optim.Adam([p], lr=0.1, foreach=False) for p in model.parameters()}

    def hook(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def update_in_tensor_hooks(model: nn.Module) -> None:
    """As it was done before torch had the other hooks."""

    def update(parameter: Tensor, gradient: Tensor) -> None:
        parameter.data.add_(gradient, alpha=-0.1)

    for parameter in model.parameters():
        parameter.register_hook(lambda grad, p=parameter: update(p, grad))


def accumulator(parameter: Tensor) -> Any:
    """A parameter's node in autograd's graph, as Megatron and DeepSpeed get it."""
    grad_fn: Any = parameter.expand_as(parameter).grad_fn
    return grad_fn.next_functions[0][0]


def sums_behind_nodes(model: nn.Module) -> None:
    """As wrappers do that keep gradients in buffers of their own."""
    model.nodes = []  # type: ignore[assignment]

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        node = accumulator(parameter)
        node.register_hook(lambda *_, p=parameter: move(p))
        model.nodes.append(node)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(
    ("face", "register"),
    [
        (face, hooks)
        for face in FACES
        for hooks in (optimizers_in_backward, update_in_tensor_hooks, sums_behind_nodes)
    ],
)
def test_trains_as_plain_autograd_does(face: str, register: Callable[[nn.Module], None]) -> None:
    batches = [torch.randn(3, 4) for _ in range(4)]

    def drive(call: Any, model: nn.Module) -> list[list[Tensor]]:
        """Nobody asks for gradients; each backward goes through two calls."""
        register(model)
        trained = []
        for x in batches:
            (call(x) * call(x + 1)).square().sum().backward()
            trained.append([parameter.detach().clone() for parameter in model.parameters()])
        return trained

    assert_alike(model_for(face), drive, face=FACES[face])


def test_deferred_again_without_hooks() -> None:
    split = autosplit.split(Net())
    handle = split.a.weight.register_hook(lambda grad: None)
    for pending in (0, 1):
        split(torch.randn(2, 4)).sum().backward()
        assert split.pending == pending
        handle.remove()


@pytest.mark.parametrize("face", ["whole", "parts"])
def test_report_says_so(face: str) -> None:
    module = FACES[face](model_for(face))
    module(torch.randn(2, 4)).sum().backward()
    message = "backward() also computes weight gradients, because hooks wait for them"
    assert message not in module.report()
    parameter = dict(module.named_parameters())["a.weight"]
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert f"{message}: a.weight" in module.report()
    handle.remove()
    assert message not in module.report()


class Doubling:
    """A hook of each kind, and what it saw."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.nodes: list[Any] = []

    def before_node(self, parameter: Tensor) -> Any:
        self.nodes.append(accumulator(parameter))
        return self.nodes[-1].register_prehook(
            lambda grads: self.seen.append(grads[0].clone()) or (grads[0] * 10,)
        )

    def behind_node(self, parameter: Tensor) -> Any:
        def see(*_: Any) -> None:
            assert parameter.grad is not None
            self.seen.append(parameter.grad.clone())

        self.nodes.append(accumulator(parameter))
        return self.nodes[-1].register_hook(see)

    def tensor(self, parameter: Tensor) -> Any:
        return parameter.register_hook(lambda grad: self.seen.append(grad.clone()) or grad * 10)

    def late(self, parameter: Any) -> Any:
        return parameter.register_post_accumulate_grad_hook(
            lambda item: self.seen.append(item.grad.clone())
        )


# Of each kind, whether a backward goes through two calls.
KINDS = {
    "whole": [("tensor", False), ("tensor", True), ("late", False), ("late", True)],
    "parts": [("tensor", False), ("late", True)],
    "compiled": [("late", False), ("tensor", True)],
}


@pytest.mark.parametrize("face", FACES)
def test_hook_sees_nothing_from_before_it(face: str) -> None:
    model = model_for(face).double()
    plain = copy.deepcopy(model)
    module = FACES[face](model)
    for kind, twice in [*KINDS[face], ("before_node", True), ("behind_node", True)]:
        assert_hook_sees_the_same(module, model, plain, kind, twice)


def assert_hook_sees_the_same(module: Any, model: Any, plain: Any, kind: str, twice: bool) -> None:
    hooks = Doubling(), Doubling()
    for earlier, after in ((1, 1), (2, 1), (1, 0), (2, 0), (0, 2)):
        inputs = torch.randn(earlier + after, 3, 4).double()
        for network, under, hook in ((module, model, hooks[0]), (plain, plain, hooks[1])):
            under.zero_grad()
            for at, x in enumerate(inputs):
                if at == earlier:
                    handle = getattr(hook, kind)(under.a.weight)
                loss = network(x).square().sum()
                (loss + network(x + 1).square().sum() if twice else loss).backward()
            if not after:
                handle = getattr(hook, kind)(under.a.weight)
            nn.utils.clip_grad_value_(under.parameters(), 100.0)
            handle.remove()
        assert_same_gradients(model, plain, exact=False)
    assert len(hooks[0].seen) == len(hooks[1].seen) == 4
    torch.testing.assert_close(hooks[0].seen, hooks[1].seen)


class Tied(nn.Module):
    """One layer in two graphs, one in a single graph."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layers, self.breaks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), breaks

    def forward(self, x: Tensor) -> Any:
        first, tied, second, last = self.layers
        x = last(second(tied(first(x)).tanh()))
        if self.breaks:
            torch._dynamo.graph_break()
        return last(tied(second(x)).tanh())


@pytest.mark.parametrize("face", FACES)
def test_late_hook_sees_the_sum_over_calls(face: str) -> None:
    torch._dynamo.reset()
    model, x = Tied(breaks=face != "whole"), torch.randn(3, 4)
    plain, seen = copy.deepcopy(model), []
    for call, under in ((FACES[face](model), model), (plain, plain)):
        loss = call(x).square().sum() + call(x + 1).square().sum()
        tied: Any = under.layers[1].weight
        tied.register_hook(lambda grad: seen.append(grad.clone()) or grad.clamp(-1, 1))
        loss.backward()
    assert_same_gradients(model, plain, exact=False)
    torch.testing.assert_close(*seen)  # one each


def test_late_hook_on_what_the_engine_has_a_part_of_is_refused() -> None:
    torch._dynamo.reset()
    model = Tied(breaks=True)
    loss = FACES["parts"](model)(torch.randn(3, 4)).sum()
    handle = model.layers[2].bias.register_hook(lambda grad: grad.clamp(-1, 1))  # type: ignore
    message = r"layers\.2\.bias got a hook between .* before the forward"
    with pytest.raises(SplitError, match=message):
        loss.backward()
    handle.remove()


@pytest.mark.parametrize("face", FACES)
def test_hook_on_any_parameter_between_forward_and_backward(face: str) -> None:
    """Also on one of the many that autograd's graph has no edge to."""
    torch._dynamo.reset()
    x = torch.randn(3, 4)

    def drive(call: Any, model: Any) -> Any:
        call(x).square().sum().backward()
        loss = call(x).square().sum()
        seen: tuple[list[Tensor], list[Tensor]] = [], []
        model[4].weight.register_hook(seen[0].append)
        model[2].weight.register_post_accumulate_grad_hook(lambda p: seen[1].append(p.grad.clone()))
        loss.backward()
        return seen

    assert_alike(nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]), drive, face=FACES[face])
