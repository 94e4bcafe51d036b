"""Operators that write, and the strides of what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, SplitError, Stage
from tests.dynamo.by_graphs import partial_of, split_by_graphs
from tests.semantics.against_autograd import (
    assert_alike,
    assert_equals_autograd,
    leaves,
    within,
)
from tests.zoo import layered

# --- in-place operators on activations and on inputs ----------------------------------------------


def writes_activation(module: Any, x: Tensor) -> Tensor:
    h = module.linear(x)
    h[:, 0] = 0.0
    h.add_(1.0)
    h[1:].mul_(2.0)
    return h.relu_()


def writes_view(module: Any, x: Tensor) -> Tensor:
    h = module.linear(x)
    h.view(-1)[:3].copy_(x.view(-1)[:3])
    return h * x


def writes_input(module: Any, x: Tensor) -> Tensor:
    x.mul_(2.0)
    return module.linear(x)


@pytest.mark.parametrize("make", [writes_activation, writes_view])
def test_activations(make: Callable[..., Tensor]) -> None:
    batch = leaves(3, 4)
    assert_equals_autograd(layered(make), batch)


def test_input_that_needs_no_gradient() -> None:
    assert_equals_autograd(layered(writes_input), [(torch.randn(3, 4),) for _ in range(2)])


def relu_first(module: Any, x: Tensor) -> Tensor:
    return module.linear(torch.relu_(x))


def writes_a_part(module: Any, x: Tensor) -> Tensor:
    x[:, 0].mul_(3.0)
    return module.linear(x.tanh_()) * x.exp()


def nobody_reads(module: Any, x: Tensor) -> Tensor:
    h = module.linear(torch.ones(3, 4))
    x.mul_(2.0)
    return h


@pytest.mark.parametrize("make", [writes_input, relu_first, writes_a_part, nobody_reads])
def test_computed_input(make: Callable[..., Tensor]) -> None:
    """Written into where it needs a gradient, which autograd allows for what was computed."""
    leaves = [torch.randn(3, 4) for _ in range(2)]

    def drive(call: Any, _: nn.Module) -> list[Any]:
        """Outputs, inputs afterwards and their gradients; all forwards before all backwards."""
        mine = [leaf.clone().requires_grad_() for leaf in leaves]
        inputs = [leaf * 1.5 for leaf in mine]
        outputs = [call(item) for item in inputs]
        after = [item.detach().clone() for item in inputs]
        for output in outputs:
            output.square().sum().backward()
        return [outputs, after, [leaf.grad for leaf in mine]]

    assert_alike(layered(make), drive, fullgraph=True, pending=2)


@pytest.mark.parametrize("view", [False, True])
def test_leaf_is_refused(view: bool) -> None:
    """By autograd itself, also where the graph is there already."""
    split = autosplit.split(layered(writes_input))
    split(torch.ones(3, 4).requires_grad_() * 1.0)
    leaf = torch.ones(3, 4).requires_grad_()
    with pytest.raises(RuntimeError, match=r"a (view of a )?leaf Variable that requires grad"):
        split(leaf.view(3, 4) if view else leaf)


def test_the_input_has_its_new_value() -> None:
    split = autosplit.split(layered(writes_input))
    x = torch.ones(2, 4)
    split(x)
    split(x)
    assert x.tolist() == [[4.0] * 4] * 2


def writes_first(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return module.linear(x.add_(1.0)) * y


FACES = pytest.mark.parametrize("face", [autosplit.split, split_by_graphs], ids=["whole", "parts"])


@FACES
def test_written_input_that_shares_memory_in_a_later_call_is_refused(
    face: Callable[[nn.Module], Any],
) -> None:
    split = face(layered(writes_first))
    rows = torch.zeros(6, 4)
    split(rows[:3], rows[3:])
    expected = (
        r"writes into (args\[0\]|x), which shares its memory with (args\[1\]|y); pass a clone"
    )
    with pytest.raises(SplitError, match=expected):
        split(rows[:3], rows[2:5])


@FACES
def test_written_input_that_shares_memory_in_the_first_call(
    face: Callable[[nn.Module], Any],
) -> None:
    rows = torch.randn(6, 4)

    def drive(call: Any, _: nn.Module) -> list[Tensor]:
        own = rows.clone()
        for first, second in (own[:3], own[2:5]), (own[:3], own[3:]), (own[1:4], own[:3]):
            call(first, second).sum().backward()
        return [own]

    assert_alike(layered(writes_first), drive, face=face)


SHARING = "writes into sum, which shares its memory with "


def counting() -> nn.Module:
    return layered(lambda m, x: m.linear(x) * m.sum.add_(1.0), sum=nn.Buffer(torch.zeros(3, 4)))


@FACES
@pytest.mark.parametrize("moved", [False, True])
def test_written_buffer_that_shares_memory_with_an_input_is_refused(
    moved: bool, face: Callable[[nn.Module], Any]
) -> None:
    model = counting()
    split = face(model)
    split(torch.zeros(3, 4))
    if moved:
        model.sum = nn.Buffer(torch.zeros(3, 4))
    with pytest.raises(SplitError, match=SHARING):
        split(model.sum[:])


@FACES
def test_written_buffer_itself_as_the_input_of_a_later_call(
    face: Callable[[nn.Module], Any],
) -> None:
    def drive(call: Any, model: nn.Module) -> Tensor:
        for x in torch.ones(3, 4), model.sum, model.sum:
            call(x).square().sum().backward()
        return model.sum

    model = layered(lambda m, x: m.linear(m.sum.add_(1.0) + x), sum=nn.Buffer(torch.zeros(3, 4)))
    assert_alike(model, drive, face=face)


@pytest.mark.parametrize("share", [lambda b: b, lambda b: b[:], lambda b: b.data])
def test_stages_refuse_inputs_that_share_memory_with_a_written_buffer(
    share: Callable[[Tensor], Tensor],
) -> None:
    model = counting()
    stage = Stage(model, torch.zeros(3, 4))
    with pytest.raises(SplitError, match=SHARING):
        stage.forward(0, [share(model.sum)])
    assert not model.sum.any()


def test_stages_refuse_written_inputs_that_share_memory() -> None:
    rows = torch.zeros(6, 4)
    stage = Stage(layered(writes_first), (rows[:3], rows[3:]))
    with pytest.raises(SplitError, match=r"writes into .*, which shares its memory with "):
        stage.forward(0, [rows[:3], rows[2:5]])


def test_inputs_may_share_a_storage_with_a_written_buffer_but_no_element() -> None:
    memory = torch.zeros(6, 4)
    model = counting()
    model.sum = nn.Buffer(memory[:3])
    stage = Stage(model, torch.zeros(3, 4))
    stage.forward(0, [memory[3:]])
    assert model.sum.tolist() == [[1.0] * 4] * 3


def writes_tensor(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.steps += 1
    return module.linear(x + module.steps)


def test_a_written_tensor_that_is_no_buffer_is_written_once_a_call() -> None:
    """In parts; a stage refuses it, and leaves the tensor as it was."""
    assert_equals_autograd(layered(writes_tensor, steps=torch.ones(1)), leaves(2, 4))
    model = layered(writes_tensor, steps=torch.ones(1))
    with pytest.raises(CaptureError, match="writes into a tensor that is neither a parameter nor"):
        Stage(model, torch.zeros(2, 4))
    assert model.steps.item() == 1
    assert torch.is_grad_enabled()


# --- custom operators that write into their arguments ---------------------------------------------


@torch.library.custom_op("autosplit_tests::write_sine", mutates_args=("out",))
def write_sine(x: Tensor, out: Tensor) -> None:
    out.copy_(x.sin())


@torch.library.custom_op("autosplit_tests::count", mutates_args=("counter",))
def count(x: Tensor, counter: Tensor) -> Tensor:
    counter.add_(1)
    return x * 2


@torch.library.custom_op(
    "autosplit_tests::noise", mutates_args=("out",), tags=[torch.Tag.nondeterministic_seeded]
)
def noise(out: Tensor) -> None:
    out.copy_(torch.rand_like(out))


write_sine.register_fake(lambda x, out: None)
count.register_fake(lambda x, counter: torch.empty_like(x))
noise.register_fake(lambda out: None)
library = torch.library.Library("autosplit_tests", "FRAGMENT")
library.define("add_(Tensor(a!) self, Tensor x) -> Tensor(a!)")
library.impl("add_", lambda y, x: y.add_(x), "CompositeExplicitAutograd")


def fresh(module: Any, x: Tensor) -> Tensor:
    out = torch.empty(3, 4)
    write_sine(x.detach(), out)
    return module.linear(x) * out


def part_of_a_tensor(module: Any, x: Tensor) -> Tensor:
    out = torch.zeros(6, 4)
    write_sine(x.detach(), out[1:4])
    return module.linear(x) * out[:3]


def buffer(module: Any, x: Tensor) -> Tensor:
    y = count(x.detach(), module.counter)
    return module.linear(x) * y + module.counter


def random(module: Any, x: Tensor) -> Tensor:
    """Drawn in the forward though only the backward reads it."""
    scale = torch.empty(3, 4)
    noise(scale)
    return F.dropout(module.linear(x) * scale, 0.5, module.training)


def returned(module: Any, x: Tensor) -> Tensor:
    y = torch.ops.autosplit_tests.add_(torch.zeros(3, 4), x.detach())
    return module.linear(x) * y


def several(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(make(module, x) for make in (fresh, part_of_a_tensor, buffer, random))


def test_equals_autograd() -> None:
    split = assert_equals_autograd(
        layered(several, counter=nn.Buffer(torch.zeros(4))), leaves(3, 4)
    )
    assert len(split.functions) == 1  # a whole graph, no parts


def test_operator_that_returns_its_argument() -> None:
    """AOTAutograd refuses it; Dynamo's graph runs."""
    batch = leaves(3, 4)
    split = assert_equals_autograd(layered(returned), batch)
    assert "whose output has alias annotations: autosplit_tests::add_" in split.report()
    with pytest.raises(CaptureError, match="whose output has alias annotations"):
        autosplit.split(layered(returned), fullgraph=True)(*batch[0])


# --- operators that address memory by strides -----------------------------------------------------


class Addressing(nn.Module):
    """The batch norm's fake keeps the strides of its transposed input, the kernel does not."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(6)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).transpose(1, 2).contiguous().transpose(1, 2)
        return self.make(self.norm(h)).square()


def own_strides(h: Tensor) -> Tensor:
    return h.as_strided(h.shape, h.stride())


def windows(h: Tensor) -> Tensor:
    return h.as_strided((2, 5, 8), (24, 4, 1))


@pytest.mark.parametrize("make", [own_strides, windows])
@FACES
def test_kernel_with_other_strides_than_its_fake_is_refused(
    face: Callable[[nn.Module], Callable[[Tensor], Tensor]], make: Callable[[Tensor], Tensor]
) -> None:
    expected = (
        r"as_strided\.default \(of .*test_in_place.py:\d+ return h\.as_strided.* strides "
        r"\(24, 1, 6\) that tracing saw; call contiguous\(\).*strides \(24, 4, 1\)"
    )
    with pytest.raises(SplitError, match=expected):
        face(Addressing(make))(torch.randn(2, 6, 4))


@pytest.mark.parametrize("make", [own_strides, windows])
def test_the_advice_of_the_error_works(make: Callable[[Tensor], Tensor]) -> None:
    model = Addressing(lambda h: make(h.contiguous()))
    batch = leaves(2, 6, 4)
    assert_equals_autograd(model, batch)


class Windows(nn.Linear):
    """With a forward of its own: Dynamo keeps the sizes that it has seen by the code of one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).as_strided((len(x), 3, 2), (4, 1, 1)).square()


def test_sizes_that_vary() -> None:
    """Symbolic strides cannot be checked; the graph runs as Dynamo traced it."""
    batches = [(torch.randn(rows, 4),) for rows in (2, 3, 5)]
    # Weight gradients are added up in another order.
    split = assert_equals_autograd(
        Windows(4, 4), batches, compare=within(1e-6), face=split_by_graphs
    )
    first, *remaining = partial_of(split).parts
    assert first.is_split
    assert remaining
    assert not any(part.is_split for part in remaining)
    assert "addresses memory by strides in a graph with symbolic sizes" in split.report()
