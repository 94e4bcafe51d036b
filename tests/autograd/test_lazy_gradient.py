"""Gradients that are pending: right without a call, dropped with ``.grad``, and what uses them."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

import autosplit
from autosplit import SplitError, SplitModule
from autosplit.runtime.functions import SplitFunctions
from tests.autograd.faces import FACES, Broken, Compiled, Net, model_for
from tests.dynamo.by_graphs import split_by_graphs
from tests.gradients import assert_same_gradients
from tests.semantics.against_autograd import assert_alike, within


@pytest.fixture(scope="module")
def captured() -> SplitModule:
    return autosplit.split(Net())


def batches(count: int = 2) -> list[Tensor]:
    return [torch.randn(3, 4) for _ in range(count)]


def backward(module: Any, *inputs: Tensor) -> None:
    for x in inputs:
        module(x).square().sum().backward()


USES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.grad.norm(),
    "numpy": lambda p: p.grad.numpy().copy(),
    "asarray": lambda p: numpy.asarray(p.grad).copy(),
    "tolist": lambda p: p.grad.tolist(),
    "print": lambda p: repr(p.grad),
    "pickle": lambda p: pickle.loads(pickle.dumps(p.grad)),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "data": lambda p: p.grad.data.clone(),
    "detach": lambda p: p.grad.detach().clone(),
    "memory": lambda p: p.grad.data_ptr() != 0,
    "storage": lambda p: p.grad.untyped_storage().nbytes(),
    "layout": lambda p: p.grad.layout,
    "dlpack": lambda p: torch.from_dlpack(p.grad).clone(),
    "out": lambda p: torch.add(p.grad, 1, out=p.grad).clone(),
    "in place": lambda p: p.grad.mul_(2).clone(),
    "assignment": lambda p: _halved(p),
    "compiled": lambda p: torch.compile(lambda g: g * 2, backend="eager")(p.grad),
    "inference": lambda p: _inference(p),
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p.grad),
    "capsule": lambda p: torch.from_dlpack(p.grad.__dlpack__()).clone(),
    "sharing": lambda p: _rebuilt(p.grad),
    "foreach": lambda p: torch._foreach_mul([p.grad], 2.0)[0],
    "set": lambda p: torch.empty(0).set_(p.grad).clone(),
    "compiled, from the parameter": lambda p: _doubled(p),
}


def _rebuilt(tensor: Tensor) -> Tensor:
    """As it goes to another process."""
    function, arguments = reduce_tensor(tensor)
    output: Tensor = function(*arguments).clone()
    return output


@torch.compile(backend="eager", fullgraph=True)
def _doubled(parameter: Any) -> Tensor:
    output: Tensor = parameter.grad * 2
    return output


def _halved(parameter: Tensor) -> Tensor:
    parameter.grad = parameter.grad / 2
    return parameter.grad.clone()


@torch.inference_mode()
def _inference(parameter: Tensor) -> list[float]:
    result: list[float] = (parameter.grad * 2).tolist()
    return result


@pytest.mark.parametrize("name", USES)
def test_any_use_has_it_computed(name: str, captured: SplitModule) -> None:
    inputs = batches()

    def drive(call: Any, model: Any) -> Any:
        backward(call, *inputs)
        result = USES[name](model.a.weight)
        assert call is model or call.pending == 0
        assert type(model.a.weight.grad) is Tensor
        assert not isinstance(result, Tensor) or type(result) is Tensor
        return result.tolist() if isinstance(result, numpy.ndarray) else result

    assert_alike(captured.unsplit, drive, face=lambda _: captured)


@pytest.mark.parametrize("function", [torch.utils.dlpack.to_dlpack, torch._C._to_dlpack_versioned])
def test_functions_in_c_are_refused_its_memory(function: Callable[[Tensor], Any]) -> None:
    """They do not ask subclasses; torch says what they did, and nothing is lost."""
    model = Net()
    split = autosplit.split(model)
    backward(split, *batches(1))
    with pytest.raises(RuntimeError, match="Cannot access data pointer of Tensor"):
        function(model.a.weight.grad)
    split.backward_weight()
    assert function(model.a.weight.grad) is not None


@pytest.mark.parametrize(
    ("face", "options"),
    [("whole", {}), ("whole", {"foreach": False}), ("parts", {"foreach": False}), ("compiled", {})],
)
def test_clipping(face: str, options: dict[str, bool]) -> None:
    inputs = batches()

    def drive(call: Any, model: nn.Module) -> Tensor:
        model.zero_grad()
        backward(call, *inputs)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options)
        assert norm > 0.1
        nn.utils.clip_grad_value_(model.parameters(), 0.05, **options)
        return norm

    assert_alike(model_for(face), drive, drive, face=FACES[face])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("face", FACES)
def test_optimizers(face: str) -> None:
    """All of them, as a closure too; and one that has no hooks, as libraries wrap them."""
    model = model_for(face)
    module = FACES[face](model)
    for name, make in OPTIMIZERS.items():
        plain = copy.deepcopy(model)
        mine, theirs = make(model.parameters()), make(plain.parameters())
        for closed in (True, False) if name != "lbfgs" else (True,):
            inputs = batches()

            def closure(each: Any, optimizer: torch.optim.Optimizer, given: Any = inputs) -> Tensor:
                optimizer.zero_grad()
                backward(each, *given)
                loss: Tensor = each(given[0]).square().sum().detach()
                return loss

            for network, optimizer in ((module, mine), (plain, theirs)):
                if closed:
                    optimizer.step(lambda item=network, o=optimizer: closure(item, o))
                else:
                    closure(network, optimizer)
                    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b), name


def test_gradient_scaler_and_fused_optimizer() -> None:
    inputs = [*batches(3), torch.full((3, 4), torch.inf)]

    def drive(call: Any, model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        for at, x in enumerate(inputs):
            optimizer.zero_grad()
            for _ in range(2):
                scaler.scale(call(x).square().sum()).backward()
            if at == 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return scaler.get_scale(), list(model.parameters())

    assert_alike(Net(), drive)


def drop(model: nn.Module, way: str) -> None:
    if way == "None":
        for parameter in model.parameters():
            parameter.grad = None
    elif way == "reversed":
        for parameter in reversed(list(model.parameters())):
            parameter.grad = None
    elif way == "zeros":
        torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
    elif way == "zeros, one by one":
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
    elif way == "own":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    else:
        model.zero_grad()


WAYS = ("zero_grad", "None", "reversed", "zeros", "zeros, one by one", "own")


@pytest.mark.parametrize("face", FACES)
def test_dropped_with_grad(face: str) -> None:
    """Nothing of the batch arrives later, and its memory is free."""
    model = model_for(face)
    plain = copy.deepcopy(model)
    module = FACES[face](model)
    backward(module, *batches(1))
    for way in WAYS:
        for again in (False, True):  # also where some of the gradient is there already
            x = torch.randn(3, 4)
            kept = weakref.ref(x)
            for network, under in ((module, model), (plain, plain)):
                if again:
                    under.zero_grad()
                    backward(network, torch.ones(3, 4))
                    assert under.a.weight.grad.norm() > 0
                backward(network, x, x)
                drop(under, way)
            assert module.pending == 0, way
            del x
            if face == "whole":
                assert kept() is None, way
            inputs = batches()
            for network in (module, plain):
                backward(network, *inputs)
            assert_same_gradients(model, plain)


def test_shape_dtype_and_device_compute_nothing(captured: SplitModule) -> None:
    backward(captured, *batches(1))
    for parameter in captured.parameters():
        grad = parameter.grad
        assert grad is not None
        assert (grad.shape, grad.dtype, grad.device) == (
            parameter.shape,
            parameter.dtype,
            parameter.device,
        )
        assert (grad.dim(), grad.size(), grad.numel()) == (
            parameter.dim(),
            parameter.size(),
            parameter.numel(),
        )
    assert captured.pending == 1
    captured.discard()


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "beside a sum"])
def test_zeros_in_place_of_pending_gradients_compute_nothing(
    earlier: bool, captured: SplitModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured.zero_grad()
    if earlier:
        backward(captured, *batches(1))
        captured.backward_weight()
    backward(captured, *batches(1))
    kept = [parameter.grad for parameter in captured.parameters()]
    with monkeypatch.context() as patch:
        patch.delattr(SplitFunctions, "backward_weight")
        torch.optim.SGD(captured.parameters()).zero_grad(set_to_none=False)
        captured.zero_grad(set_to_none=False)
    assert captured.pending == 0
    assert not any(grad.any() for grad in kept if grad is not None)
    backward(captured, torch.ones(3, 4))
    assert all(p.grad is not None and p.grad.any() for p in captured.parameters())


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("dropped", [True, False])
def test_gradient_that_somebody_holds(dropped: bool, face: str) -> None:
    """It stays that of its batch, or goes on accumulating, as autograd's would."""
    one, two = batches()

    def drive(call: Any, model: Any) -> Tensor:
        backward(call, one)
        kept = model.a.weight.grad
        if dropped:
            model.zero_grad()
        backward(call, two)
        return kept * 1

    assert_alike(model_for(face), drive, face=FACES[face])


def test_discard() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    for module in (autosplit.split(model), split_by_graphs(model)):
        one, two = batches()
        model.zero_grad()
        plain.zero_grad()
        backward(plain, one)
        backward(module, one)
        module.backward_weight()
        earlier = model.a.weight.grad.data_ptr()  # held, it would have two computed at once
        backward(module, two)
        kept = model.a.bias.grad
        module.discard()
        assert module.pending == 0
        assert model.a.weight.grad.data_ptr() == earlier
        with pytest.raises(SplitError, match="was discarded"):
            kept.norm()
        assert_same_gradients(model, plain)
        model.zero_grad()
        backward(module, two)
        module.discard()
        assert model.a.weight.grad is None


def test_discard_of_a_compiled_model() -> None:
    torch._dynamo.reset()
    model = Broken()
    module = Compiled(model)
    backward(module, *batches())
    module.discard()
    assert module.pending == 0
    assert model.a.weight.grad is None


@pytest.mark.parametrize("face", FACES)
def test_gradients_that_come_from_elsewhere_too(face: str) -> None:
    """A regulariser, in the same backward and in one of its own."""
    inputs = [x.double() for x in batches()]

    def drive(call: Any, model: Any) -> None:
        model.zero_grad()
        for x in inputs:
            penalty = sum(p.square().sum() for p in model.parameters())
            (call(x).square().sum() + 0.1 * penalty).backward()
            (model.a.weight * 3).sum().backward()
        assert face != "whole" or call is model or call.pending == 2

    model = model_for(face).double()
    assert_alike(model, drive, drive, face=FACES[face], compare=within(1e-12))


def test_two_split_modules_with_a_parameter_in_common() -> None:
    """The module whose backward comes first has the pending work of both."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), shared).double()
    plain = copy.deepcopy(model)
    first, second = (
        autosplit.split(model[:3], max_pending=math.inf),
        autosplit.split(model[3:], max_pending=math.inf),
    )
    inputs = [x.double() for x in batches()]
    for step in range(3):
        for network in (model, plain):
            network.zero_grad()
        for x in inputs:
            second(first(x)).square().sum().backward()
            plain(x).square().sum().backward()
        assert (first.pending, second.pending) == (0, 2)
        if step == 1:
            second.backward_weight()
            assert (first.pending, second.pending) == (0, 0)
        norm = shared.weight.grad.norm()
        torch.testing.assert_close(norm, plain[0].weight.grad.norm())
        assert (first.pending, second.pending) == (0, 0)
        assert_same_gradients(model, plain, exact=False)


def test_create_graph_elsewhere() -> None:
    """Autograd then replaces ``.grad`` by a sum that has a graph."""
    (x,) = batches(1)

    def drive(call: Any, model: Any) -> None:
        backward(call, x)
        with warnings.catch_warnings(action="ignore"):  # torch warns once a process
            model.a.weight.square().sum().backward(create_graph=True)
        assert call is model or call.pending == 0
        assert model.a.weight.grad.requires_grad
        for parameter in model.parameters():  # each gradient is part of its own graph
            parameter.grad = parameter.grad.detach()

    assert_alike(Net(), drive, compare=within(1e-6))


def test_nothing_is_left_of_a_model_that_is_gone() -> None:
    model = Net()
    split = autosplit.split(model)
    backward(split, *batches())
    split.backward_weight()
    backward(split, *batches())
    kept = weakref.ref(model.a.weight)
    del model, split
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("face", ["whole", "parts"])
def test_gradients_outlive_a_temporary_model(face: str) -> None:
    model, inputs = model_for(face), batches()
    plain = copy.deepcopy(model)
    backward(plain, *inputs)

    def gradients(model: Any) -> tuple[list[Any], Any]:
        backward(FACES[face](model), *inputs)
        return [parameter.grad for parameter in model.parameters()], model.a.bias

    reference, bias = gradients(model)
    kept = weakref.ref(model.a.weight)
    del model
    torch._dynamo.reset()
    gc.collect()
    expected = [parameter.grad for parameter in plain.parameters()]
    assert all(map(torch.equal, reference, expected))
    assert torch.equal(bias.grad, plain.a.bias.grad)
    del reference, bias
    gc.collect()
    assert kept() is None


def test_gradients_that_outlive_a_model_and_are_never_used_hold_nothing() -> None:
    split = autosplit.split(Net())
    backward(split, *batches())
    reference = [split.a.weight.grad]
    del split
    gc.collect()
    kept = weakref.ref(reference[0]._heir[1])  # type: ignore[union-attr,index]
    del reference
    gc.collect()
    assert kept() is None


def test_failure_is_not_forgotten() -> None:
    """A part is lost then, and ``.grad`` without it would be wrong."""
    model = Net()
    split = autosplit.split(model)
    x = batches(1)[0].requires_grad_() * 1.0
    backward(split, x)
    x.detach().zero_()
    for _ in range(2):
        with pytest.raises(SplitError, match="written in place"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(SplitError, match=r"lost.*\n?.*(.|\n)*zero_grad\(\) and repeat the step"):
        torch.optim.SGD(model.parameters()).step()
    model.zero_grad()
    plain = copy.deepcopy(model)
    inputs = batches()
    backward(split, *inputs)
    backward(plain, *inputs)
    assert_same_gradients(model, plain)


def test_moved_module_takes_its_gradients_along() -> None:
    inputs = batches()

    def drive(call: Any, model: Any) -> None:
        backward(call, *inputs)
        call.double()
        assert model.a.weight.grad.dtype is torch.float64

    assert_alike(Net(), drive)


def test_an_idle_split_module_costs_other_optimizers_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules[torch.optim.Optimizer.__module__]
    for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(module, hooks, OrderedDict[int, Any]())  # without other tests' hooks
    split = autosplit.split(nn.Linear(2, 2))
    split(torch.ones(1, 2)).sum().backward()
    split.backward_weight()
    other, called = torch.optim.SGD(nn.Linear(2, 2).parameters()), list[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "/autosplit/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        other.step()
    finally:
        sys.setprofile(None)
    assert called == ["step_hook"]


def test_zeros_of_pending_gradients_take_time_in_proportion_to_their_number() -> None:
    def calls(layers: int) -> int:
        """Calls of functions in one ``zero_grad`` beside two pending microbatches."""
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        split = autosplit.split(model, max_pending=2)
        for _ in range(2):
            split(torch.ones(1, 2)).sum().backward()
        count = itertools.count()
        sys.setprofile(lambda frame, event, argument: next(count))
        try:
            split.zero_grad(set_to_none=False)
        finally:
            sys.setprofile(None)
        assert split.pending == 0
        return next(count)

    few, many = calls(4), calls(12)
    assert many < 3.2 * few
