"""A model that changes after its capture: another graph, or a refusal, never a stale result."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError, SplitError, Stage
from tests.semantics.against_autograd import assert_alike, assert_equals_autograd, leaves
from tests.zoo import Made, layered

FACTOR = 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(4, 4)
        self.scale = 1.0
        self.table = {"add": 0.5}
        self.shift = torch.ones(4)
        self.shifts = [torch.ones(4)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.first(x)) * self.scale + self.table["add"]
        return self.last(h + self.shift + self.shifts[0]) * FACTOR


def new_list_item(model: Model) -> None:
    model.shifts[0] = torch.zeros(4)


def new_table(model: Model) -> None:
    model.table["add"] = -1.0


def tie(model: Model) -> None:
    model.last.weight = model.first.weight


def swap_in_function(model: Model) -> None:
    model.forward = types.MethodType(lambda self, x: self.first(x) * 5.0, model)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "attribute": lambda m: setattr(m, "scale", 3.0),
    "dropout": lambda m: setattr(m.drop, "p", 0.5),
    "dictionary": new_table,
    "plain tensor": lambda m: setattr(m, "shift", torch.zeros(4)),
    "tensor in a list": new_list_item,
    "load_state_dict": lambda m: m.load_state_dict(Model().state_dict()),
    "frozen": lambda m: m.first.bias.requires_grad_(False),
    "parameter": lambda m: setattr(m.last, "weight", nn.Parameter(torch.zeros(4, 4))),
    "tied": tie,
    "bias removed": lambda m: setattr(m.last, "bias", None),
    "submodule of another kind": lambda m: setattr(m, "last", nn.Tanh()),
    "forward": swap_in_function,
}


def test_the_next_call_knows() -> None:
    """Of one change after another."""
    model, x = Model(), torch.randn(3, 4)
    split = autosplit.split(model)
    split(x).sum().backward()
    for name, change in CHANGES.items():
        split.backward_weight()
        change(model)
        outputs, grads = [], []
        for network in (split, model):
            model.zero_grad()
            torch.manual_seed(1)
            for _ in range(2):
                outputs.append(network(x))
                outputs[-1].square().sum().backward()
            split.backward_weight()
            grads.append([parameter.grad for parameter in model.parameters()])
        assert all(map(torch.equal, outputs[:2], outputs[2:])), name
        for mine, theirs in zip(*grads, strict=True):
            assert (mine is None) == (theirs is None), name
            assert mine is None or torch.equal(mine, theirs), name


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.linear(x))


@pytest.mark.parametrize("blocks", [1, 6], ids=["traced whole", "captured by blocks"])
def test_a_forward_replaced_on_the_class_of_a_submodule(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(*[Gated() for _ in range(blocks)]), torch.randn(3, 4)
    split = autosplit.split(model)
    old = Gate.forward
    for forward in (old, lambda _, x: torch.sigmoid(x), old):
        monkeypatch.setattr(Gate, "forward", forward)
        assert torch.equal(split(x), model(x))
    assert len(split.functions) == 2


def test_two_settings_back_and_forth_keep_two_graphs() -> None:
    split = autosplit.split(Model())
    x = torch.randn(3, 4)
    for scale in (1.0, 2.0, 1.0, 2.0):
        split.scale = scale
        assert split.model.scale == scale
        split(x)
    assert len(split.functions) == 2


def test_converted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    for item in (torch.float32, torch.bfloat16, torch.float32):
        model.to(item)
        batch = leaves(3, 4, dtype=item)
        assert_equals_autograd(model, batch)


def test_gradient_goes_to_the_parameter_of_its_forward() -> None:
    x = torch.randn(3, 4)

    def drive(call: Any, model: Any) -> Any:
        first, last = model[0].weight, model[1].weight
        leaf = x.clone().requires_grad_()
        output = call(leaf)
        model[0].weight = nn.Parameter(torch.zeros(4, 4))
        output.sum().backward()
        model[1].weight = nn.Parameter(torch.zeros(2, 4))
        if call is not model:
            call.backward_weight()
        return leaf.grad, first.grad, last.grad

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    assert_alike(model, drive)


@pytest.mark.parametrize("change", [nn.Module.double, lambda m: m.zero()], ids=["double", "data"])
def test_data_exchanged_between_forward_and_backward(change: Callable[[Any], Any]) -> None:
    class Zeroed(nn.Sequential):
        def zero(self) -> None:
            self[1].weight.data = torch.zeros(2, 4)

    model = Zeroed(nn.Linear(4, 4), nn.Linear(4, 2))
    split = autosplit.split(model)
    output = split(torch.randn(3, 4, requires_grad=True))
    change(model)
    expected = r"moved, converted or replaced .*1\.weight\. Run the backward"
    with pytest.raises(SplitError, match=expected):
        output.sum().backward()


def test_computed_parameters_of_several_calls() -> None:
    """They have a graph of their own, which the microbatches share: ``retain_graph=True``."""
    x, base = torch.randn(3, 4), torch.randn(2, 4)

    def drive(call: nn.Module, model: nn.Module) -> Any:
        leaf = base.clone().requires_grad_()
        options = {"weight": leaf.sin()}
        losses = [
            torch.func.functional_call(call, options, (k * x,)).square().sum() for k in (1, 2)
        ]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        if isinstance(call, autosplit.SplitModule):
            call.backward_weight()
        return leaf.grad

    assert_alike(nn.Linear(4, 2, bias=False), drive)


def scaled() -> nn.Module:
    """A constant that I reads and W does not."""
    return layered(lambda m, x: m.linear(x) * m.scale, scale=torch.full((4,), 2.0))


def scaled_weight() -> nn.Module:
    """The constant stands between the parameter and its use: W reads it too."""
    weight, scale = nn.Parameter(torch.randn(4, 4)), torch.full((4, 4), 2.0)
    return Made(lambda m, x: x @ (m.weight * m.scale), weight=weight, scale=scale)


WRITTEN_LATE = r"between backward\(\) and backward_weight\(\): scale\. Call backward_weight\(\)"
WRITTEN = r"written in place between the forward and its backward: scale\. Run the backward"


def test_constant_written_between_forward_and_backward() -> None:
    """Refused, as autograd does; a write before the next forward is seen by it."""
    split = autosplit.split(scaled(), fullgraph=True)
    x = torch.randn(3, 4).requires_grad_()  # without it, I has nothing to do
    outputs = [split(x) for _ in range(2)]
    outputs[0].sum().backward()
    split.scale.mul_(3.0)
    split.backward_weight()
    with pytest.raises(SplitError, match=WRITTEN):
        outputs[1].sum().backward()
    assert_equals_autograd(split.model, leaves(3, 4))
    assert torch.equal(split(x), split.model(x))
    assert len(split.functions) == 1


def test_parameter_written_from_which_the_backward_recomputes() -> None:
    """Autograd's backward does not read what is added after a norm; a recomputation does."""

    def block() -> nn.Module:
        mlp = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
        return Made(
            lambda m, x: m.norm(x + m.mlp(x)) + m.added,
            mlp=mlp,
            norm=nn.LayerNorm(128),
            added=nn.Parameter(torch.zeros(128)),
        )

    def run(model: Any, written: Tensor) -> None:
        output = model(torch.linspace(-1, 1, 8192).view(64, 128))
        with torch.no_grad():
            written.add_(0.1)
        output.square().sum().backward()

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(128, 128), block(), block(), nn.Linear(128, 3))
    expected, fast = copy.deepcopy(plain), copy.deepcopy(plain)
    with pytest.raises(SplitError, match=r'1\.added.* With memory="fast", nothing is recomp'):
        run(autosplit.split(plain), plain[1].added)
    run(expected, expected[1].added)
    run(autosplit.split(fast, memory="fast"), fast[1].added)
    pairs = zip(fast.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)


def test_memory_setting_is_advised_only_where_it_helps() -> None:
    """Not if nothing is recomputed, and not under torch.compile, which has no such option."""
    faces: dict[str, Callable[[nn.Module], Any]] = {
        "balanced": autosplit.split,
        "fast": partial(autosplit.split, memory="fast"),
        "compiled": partial(torch.compile, backend="autosplit"),
    }
    for name, face in faces.items():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        output = face(model)(torch.randn(3, 4))
        with torch.no_grad():
            model[2].weight.mul_(2.0)
        with pytest.raises(SplitError, match=r"2\.weight\. Run the backward") as raised:
            output.sum().backward()
        assert ("memory=" in str(raised.value)) == (name == "balanced")


def test_buffers_written_by_a_later_forward_in_train_mode() -> None:
    split = autosplit.split(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    x = torch.randn(3, 4)
    output = split.eval()(x)
    split.train()(x)
    text = r"1\.running_mean.* A later forward in train mode may have written the buffers"
    with pytest.raises(SplitError, match=text) as raised:
        output.sum().backward()
    assert "memory=" not in str(raised.value)


def test_constant_given_other_data() -> None:
    split = autosplit.split(scaled(), fullgraph=True)
    output = split(torch.randn(3, 4))
    split.scale.data = torch.ones(4)
    with pytest.raises(SplitError, match=r"replaced .*: scale\. Run the backward"):
        output.sum().backward()


def test_constant_written_before_the_weights_of_a_stage() -> None:
    x = torch.randn(3, 4).requires_grad_()
    stage = Stage(scaled_weight(), (x,))
    grads = [torch.ones_like(stage.forward(microbatch, [x])[0]) for microbatch in range(2)]
    stage.backward_input(0, grads[:1])
    stage.module.scale.mul_(3.0)
    with pytest.raises(SplitError, match=WRITTEN_LATE):
        stage.backward_weight(0)
    with pytest.raises(SplitError, match=WRITTEN):
        stage.backward_input(1, grads[1:])


def test_weights_of_a_stage_tied_after_its_capture() -> None:
    """One memory for the sum of both gradients, which each would overwrite under its own name."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    stage = Stage(model, (torch.randn(3, 4),))
    memory: dict[Tensor, Tensor] = {}
    stage.place_gradients(lambda p, _: memory.setdefault(p, torch.empty_like(p)))
    model[2].weight = model[0].weight
    reference = copy.deepcopy(model)
    reference(x).backward(grad)
    stage.forward(0, [x.clone()])
    stage.backward_input(0, [grad.clone()])
    stage.backward_weight(0)
    stage.publish()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


class Counting(nn.Module):
    """Writes one buffer, and reads another afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1.0)
        return self.linear(x) + self.shift


def test_buffer_that_becomes_a_view_of_a_written_one() -> None:
    model = Counting()
    split, x = autosplit.split(model), torch.randn(3, 4)
    assert torch.equal(split(x), model.linear(x))
    model.shift = model.total[:]
    with pytest.warns(autosplit.DeferralWarning, match="0% of the weight gradients"):
        assert torch.equal(split(x), model.linear(x) + 2.0)


class Scales(nn.Module):
    scale = torch.full((4,), 2.0)


class WithClassTensors(Scales):
    shift = torch.ones(4)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale) * (self.scale + self.shift)


def test_tensors_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call sees values written into such a tensor, and its replacement."""
    monkeypatch.setattr(Scales, "scale", torch.full((4,), 2.0))
    monkeypatch.setattr(WithClassTensors, "shift", torch.ones(4))
    batch = leaves(3, 4)
    split = assert_equals_autograd(WithClassTensors(), batch)
    assert len(split.functions) == 1
    (x,) = batch[0]
    Scales.scale.mul_(3.0)
    assert torch.equal(split(x), split.model(x))
    assert len(split.functions) == 1
    WithClassTensors.shift = torch.zeros(4)
    assert torch.equal(split(x), split.model(x))
    Scales.scale = torch.full((4,), 5.0)
    assert torch.equal(split(x), split.model(x))
    assert len(split.functions) == 3


READ: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "item": lambda m, x: m.linear(x) * m.numbers[0].item(),
    "argument": lambda m, x: torch.add(m.linear(x), x, alpha=m.numbers[1]),
}


@pytest.mark.parametrize("name", READ)
def test_value_of_a_tensor_that_is_kept(name: str) -> None:
    """It was that of the capture for ever: tracing takes the value of such a tensor for fixed."""
    model = layered(READ[name], numbers=[torch.tensor(2.0), torch.tensor(2)])

    def drive(call: Any, model: Any) -> list[Tensor]:
        results = [call(torch.ones(2, 4))]
        for number in model.numbers:
            number.add_(1)
        return [*results, call(torch.ones(2, 4))]

    assert_alike(model, drive)
    with pytest.raises(CaptureError, match=r"reads the value .* of a tensor that is neither"):
        Stage(model, [torch.ones(2, 4)])
