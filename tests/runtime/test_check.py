"""``AUTOSPLIT_CHECK=1``: what is silent without it is an error, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import autosplit
from autosplit.autograd import function
from autosplit.errors import CheckError
from autosplit.passes import PASSES, Pass, SplitGraphs
from autosplit.runtime.check import CHECK_VARIABLE, CheckedFunctions, checked
from autosplit.runtime.functions import SplitFunctions
from tests.semantics.against_autograd import assert_equals_autograd, leaves
from tests.zoo import Made

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")


def two_layers() -> nn.Module:
    return Made(lambda m, x: m.b(torch.tanh(m.a(x)) * 3.0), a=nn.Linear(8, 8), b=nn.Linear(8, 4))


def compiled(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend="autosplit", options=options)


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_variable_nothing_of_it_runs(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    assert checked(SplitFunctions, list) is not SplitFunctions
    monkeypatch.setenv(CHECK_VARIABLE, value)
    assert checked(SplitFunctions, list) is SplitFunctions


def test_bits_buffers_generators_and_hooks_are_as_without() -> None:
    fired: list[Tensor] = []
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 4)
    )
    model[4].weight.register_hook(fired.append)
    split = assert_equals_autograd(model, leaves(6, 8), fullgraph=True)
    assert isinstance(split.functions[0], CheckedFunctions)
    assert len(fired) == 4


@pytest.mark.parametrize("face", [autosplit.split, compiled])
def test_a_parameter_written_unseen_is_named_with_its_line(face: Callable[..., Any]) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    norms = model[0].parametrizations.weight.original0
    face(model)(torch.randn(6, 8)).sum().backward()
    norms.data.mul_(2)
    with pytest.raises(CheckError, match=r"unseen by autograd.*original0 \(for .*\.py:\d+ "):
        autosplit.backward_weight(model) if face is compiled else norms.grad.sum()


def test_with_an_accelerator_the_step_reads_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autosplit.runtime.check.has_accelerator", lambda: True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters())
    hidden = torch.randn(6, 8, requires_grad=True) * 2
    split = autosplit.split(model)
    split(hidden).sum().backward()
    hidden.data.zero_()
    split.backward_weight()
    with pytest.raises(CheckError, match="unseen by autograd"):
        optimizer.step()
    optimizer.step()  # it is said once


def test_an_output_of_a_stage_written_through_numpy() -> None:
    model = Made(lambda m, x: (h := m.a(x), m.b(h)), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    stage = autosplit.Stage(model, [torch.randn(6, 8)])
    for written in (False, True):
        hidden, output = stage.forward(0, [torch.randn(6, 8)])
        stage.backward_input(0, [torch.ones_like(hidden), torch.ones_like(output)])
        if written:
            hidden.numpy()[0] = 0.0
            with pytest.raises(CheckError, match=r"b_input \(for .*test_check\.py"):
                stage.backward_weight(0)
        else:
            stage.backward_weight(0)


def changes_a_constant(program: SplitGraphs) -> bool:
    result = program.joint.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    node = [item for item in result if item.args[1] == 3.0][-1]
    node.args = (node.args[0], 3.1)
    return True


def drops_a_derivative(program: SplitGraphs) -> bool:
    graph = program.joint.graph
    (node,) = graph.find_nodes(op="call_function", target=aten.tanh_backward.default)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    return True


def stage_of(module: nn.Module, **options: Any) -> Callable[[Tensor], Any]:
    return lambda x: autosplit.Stage(module, [x], **options).forward(0, [x])


@pytest.mark.parametrize("face", [autosplit.split, compiled, stage_of])
@pytest.mark.parametrize("wrong", [changes_a_constant, drops_a_derivative])
def test_a_wrong_pass(face: Callable[..., Any], wrong: Callable[..., bool]) -> None:
    passes = (Pass("wrong", wrong), *PASSES)
    torch._dynamo.reset()  # which may know the forward's code
    with pytest.raises(CheckError, match=r"(?s)input_grad .*test_check\.py:\d+ .*tanh.*difference"):
        face(two_layers(), passes=passes)(torch.randn(6, 8, requires_grad=True))


def test_a_hook_that_fires_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = function.weight_gradients

    def twice(work: Any) -> Any:
        result = deliver(work)
        torch.autograd.backward([leaf for _, leaf in work.named_leaves()], result)
        return result

    monkeypatch.setattr(function, "weight_gradients", twice)
    model = nn.Linear(8, 4)
    model.weight.register_hook(lambda _: None)
    output = autosplit.split(model)(torch.randn(6, 8)).sum()
    with pytest.raises(CheckError, match="hooks on parameter weight fired 2 times with a gradient"):
        output.backward()


def test_any_parameter_that_is_asked_for_is_noticed() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    loss = autosplit.split(model)(torch.randn(6, 8)).sum()
    with pytest.raises(autosplit.SplitError, match="requests gradients of parameters"):
        loss.backward(inputs=[model[1].weight])


def test_why_a_capture_is_not_compared_is_said() -> None:
    model = Made(lambda m, x: checkpoint(m.a, x, use_reentrant=True), a=nn.Linear(8, 4))
    with pytest.warns(UserWarning, match="not compared with plain autograd: .*[Cc]heckpoint"):
        autosplit.split(model)(torch.randn(6, 8, requires_grad=True)).sum().backward()
    assert model.a.weight.grad.shape == (4, 8)
