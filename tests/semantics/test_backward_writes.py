"""What a backward writes, in every face: as plain autograd leaves it, once a microbatch."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import CaptureError
from autosplit.torch_internals.version import TORCH
from tests.all_true import assert_all
from tests.ranks import Ranks
from tests.semantics.against_autograd import assert_equals_autograd
from tests.semantics.backward_writers import (
    WRITERS,
    Both,
    Descending,
    IntoSum,
    OfAttribute,
    Scaled,
    Twice,
    Writer,
    trained,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"  # by Dynamo, in parts
)

writers = pytest.mark.parametrize("kind", WRITERS)
two_writers = pytest.mark.parametrize("kind", [Twice, Scaled])


def batches() -> list[Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return [torch.randn(6, 8, generator=generator) for _ in range(3)]


def plainly(kind: Callable[[], Writer], forwards: int = 1) -> Writer:
    """The model behind three microbatches, of which so many are in flight."""
    model = kind()
    outputs: list[Tensor] = []
    for x in batches():
        outputs.append(model(x))
        if len(outputs) == forwards:
            outputs.pop(0).square().sum().backward()
    for output in outputs:
        output.square().sum().backward()
    return model


def assert_alike(mine: nn.Module, plain: nn.Module, *, exact: bool = True) -> None:
    for (name, ours), theirs in zip(mine.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5, msg=name
        )
    for (name, ours), theirs in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=0 if exact else 1e-5), (
                name
            )


@writers
def test_split(kind: type[Writer]) -> None:
    assert_equals_autograd(kind(), [(x,) for x in batches()], fullgraph=True)


@two_writers
def test_in_parts(kind: type[Writer]) -> None:
    model = assert_equals_autograd(kind(breaks=True), [(x,) for x in batches()])
    assert "after" in model.report()


@two_writers
def test_under_torch_compile(kind: type[Writer]) -> None:
    torch._dynamo.reset()
    model = kind()
    compiled = torch.compile(model, backend="autosplit")
    for x in batches():
        compiled(x).square().sum().backward()
    autosplit.backward_weight(model)
    assert_alike(model, plainly(kind))


def driven(
    kind: Callable[[], Writer],
    run: Callable[[autosplit.Stage, int, list[Any]], None],
    **options: Any,
) -> Writer:
    """The module of a stage behind three microbatches, two of them in flight."""
    model = kind()
    stage = autosplit.Stage(model, [batches()[0]], **options)
    waiting: list[list[Tensor]] = []
    for index, x in enumerate(batches()):
        waiting.append([2 * y for y in stage.forward(index, [x])])
        if len(waiting) == 2:
            run(stage, index - 1, waiting.pop(0))
    run(stage, 2, waiting.pop(0))
    for index in range(3) if stage.deferred_tensors else ():
        stage.backward_weight(index)
    stage.publish()
    return model


def halves(stage: autosplit.Stage, index: int, grads: list[Any]) -> None:
    stage.backward_input(index, grads)


def fused(stage: autosplit.Stage, index: int, grads: list[Any]) -> None:
    stage.backward(index, grads)


@writers
def test_stage(kind: type[Writer]) -> None:
    assert_alike(driven(kind, halves), plainly(kind, 2))


@pytest.mark.parametrize(("run", "late"), [(fused, False), (halves, True), (fused, True)])
def test_stage_otherwise(run: Any, late: bool) -> None:
    assert_alike(driven(Twice, run, late_input=late), plainly(Twice, 2))


def test_with_inductor() -> None:
    model = Twice()
    split = autosplit.split(model, backend="inductor", fullgraph=True)
    for x in batches():
        split(x).square().sum().backward()
    split.backward_weight()
    assert_alike(model, plainly(Twice), exact=False)


@pytest.mark.parametrize(
    ("kind", "options"), [(IntoSum, {"schedule": "gpipe"}), (IntoSum, {"weights": "fill"})]
)
def test_two_ranks(on_ranks: Ranks, kind: type[Writer], options: dict[str, Any]) -> None:
    for found in on_ranks(partial(trained, **options), 2, (kind,), timeout=60):
        assert_all(found)


def test_a_sum_is_there_behind_a_backward() -> None:
    """Reading a buffer could not compute it."""
    model, plain = IntoSum(), IntoSum()
    split = autosplit.split(model, max_pending=3)
    for x in batches():
        split(x).square().sum().backward()
        plain(x).square().sum().backward()
        assert torch.equal(model.total, plain.total)
    assert_alike(model, plain)


def test_what_the_forward_reads_does_not_wait() -> None:
    model = Scaled()
    split = autosplit.split(model, fullgraph=True)
    split(batches()[0]).sum().backward()
    assert split.pending == 1
    assert model.history.any()


def test_writes_of_what_is_dropped() -> None:
    """Nobody wants the gradients any more, but the sums."""
    model = IntoSum()
    split = autosplit.split(model, fullgraph=True, max_pending=3)
    for x in batches():
        split(x).square().sum().backward()
        split.zero_grad()
    split.backward_weight()
    assert torch.equal(model.total, plainly(IntoSum).total)


def test_writes_where_only_inputs_are_asked_for() -> None:
    model, plain = IntoSum(), IntoSum()
    split = autosplit.split(model, fullgraph=True)
    for each in (split, plain):
        for x in batches():
            x.requires_grad_()
            torch.autograd.grad(each(x).square().sum(), x)
    assert split.pending == 0
    assert torch.equal(model.total, plain.total)


def test_attribute_of_a_parameter_in_parts() -> None:
    model, plain = OfAttribute(), OfAttribute()
    split = autosplit.split(model)
    for x in batches():
        split(x).square().sum().backward()
        plain(x).square().sum().backward()
    split.backward_weight()
    assert_alike(model, plain)
    assert torch.equal(model.weight.main_grad, plain.weight.main_grad)
    assert plain.weight.main_grad.any()


def test_attribute_of_a_parameter_in_a_stage() -> None:
    """Refused with advice that works."""
    with pytest.raises(CaptureError, match=r"main_grad[^$]*register_buffer\(name, tensor, persist"):
        autosplit.Stage(OfAttribute(), [batches()[0]])
    model, plain = IntoSum(), OfAttribute()
    model.weight.main_grad = model.total
    stage = autosplit.Stage(model, [batches()[0]])
    for index, x in enumerate(batches()):
        grads = [2 * y for y in stage.forward(index, [x])]
        stage.backward_input(index, grads)
        stage.backward_weight(index)
        plain(x).square().sum().backward()
    assert torch.equal(model.weight.main_grad, plain.weight.main_grad)


def test_written_in_both_halves() -> None:
    said = r"history is written in the forward and again in the backward \(from .*abs\(\)\.max"
    with pytest.raises(CaptureError, match=said):
        autosplit.split(Both(), fullgraph=True)(batches()[0])
    with pytest.warns(UserWarning, match=said):
        split = assert_equals_autograd(Both(), [(x,) for x in batches()])
    assert "written in the forward" in split.report()


def test_written_parameter() -> None:
    """An optimizer inside of the backward."""
    said = r"the backward writes into parameter 'weight' in place \(from .*weight\.sub_"
    if TORCH < (2, 12):  # Dynamo gives the line up before
        said = r"(?s)cannot be captured in one graph.*leaf Variable .* in-place operation"
    with pytest.raises(CaptureError, match=said):
        autosplit.split(Descending(), fullgraph=True)(batches()[0])
    model, plain = Descending(), Descending()
    split = autosplit.split(model)
    for x in batches():
        split(x).square().sum().backward()
        plain(x).square().sum().backward()
        split.backward_weight()
    assert_alike(model, plain)
    assert torch.equal(model.weight, plain.weight)
    assert not torch.equal(model.weight, Descending().weight)


def test_dumped_graphs_show_it(tmp_path: pathlib.Path) -> None:
    split = autosplit.split(IntoSum(), fullgraph=True)
    split(batches()[0]).square().sum().backward()
    split.dump(tmp_path)
    assert "write total" in (tmp_path / "backward_input.py").read_text()
    assert copy.deepcopy(split.unsplit) is not None
