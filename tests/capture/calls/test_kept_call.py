"""Calls that were traced before are found without tracing, and only where nothing is otherwise."""

from __future__ import annotations

import pathlib
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import autosplit
from autosplit.capture import export
from autosplit.capture.cache.file_store import FileStore
from autosplit.capture.cache.split_graph_cache import VARIABLE

FOUND = "found"


class Small(nn.Module):
    """Layers with a factor."""

    def __init__(self, layers: int = 1, factor: float = 2.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        self.dropout = nn.Dropout(0.5)
        self.factor = factor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.dropout(torch.tanh(self.layers(x)) * self.factor).sum()}


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def outcome(model: nn.Module, x: Tensor | None = None) -> str:
    """What the cache had for a step that computes what eager autograd does."""
    x = torch.ones(2, 4) if x is None else x
    torch.manual_seed(1)
    loss = model(x)["loss"]
    if loss.requires_grad:
        loss.backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    split = autosplit.split(model, fullgraph=True)
    torch.manual_seed(1)
    again = split(x)["loss"]
    assert torch.equal(again, loss)
    if loss.requires_grad:
        again.backward()
        split.backward_weight()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)
    model.zero_grad()
    return split.report().partition("Graph cache: ")[2].partition(".\n")[0]


def test_a_call_is_found_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = counters["autosplit"].copy()
    assert outcome(Small()) == "made and kept"

    def fail(*args: object) -> None:
        raise AssertionError("Dynamo was asked")

    monkeypatch.setattr(export, "fullgraph_capture", fail)
    assert outcome(Small()) == FOUND
    after = counters["autosplit"] - before
    assert (after["call_miss"], after["call_hit"], after["call_bypass"]) == (1, 1, 0)


CHANGES: dict[str, Callable[[Small], object]] = {
    "mode": lambda model: model.eval(),
    "frozen": lambda model: model.layers[0].weight.requires_grad_(False),
    "all frozen": lambda model: model.requires_grad_(False),
    "attribute": lambda model: setattr(model, "factor", 3.0),
    "probability": lambda model: setattr(model.dropout, "p", 0.25),
    "layer": lambda model: model.layers.append(nn.Linear(4, 4)),
    "kind of layer": lambda model: setattr(model, "dropout", nn.Identity()),
    "hook": lambda model: model.layers[0].register_forward_hook(lambda m, a, r: r * 2),
    "tied": lambda model: setattr(model.layers[0], "weight", model.layers[1].weight),
    "strides": lambda model: setattr(
        model.layers[0], "weight", nn.Parameter(torch.randn(4, 4).t())
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_another_call(change: str) -> None:
    assert outcome(Small(layers=2)) == "made and kept"
    model = Small(layers=2)
    assert outcome(model) == FOUND
    CHANGES[change](model)
    assert outcome(model) != FOUND
    assert outcome(model) == FOUND


def test_other_settings_are_another_call() -> None:
    """Precision, autocast, shapes and gradients of inputs."""
    model = Small()
    outcome(model)
    assert outcome(model, torch.ones(3, 4)) == "made and kept"
    assert outcome(model, torch.ones(2, 4, requires_grad=True)) == "made and kept"
    with torch.autocast("cpu", torch.bfloat16):
        assert outcome(model) == "made and kept"
    with torch.no_grad():
        assert outcome(model) != FOUND
    assert outcome(model.double(), torch.ones(2, 4).double()) == "made and kept"
    assert outcome(model.float()) == FOUND


def test_what_was_found_is_guarded_as_what_was_traced() -> None:
    model, x = Small().eval(), torch.ones(2, 4)
    outcome(model)
    split = autosplit.split(model, fullgraph=True)
    for factor in (2.0, 5.0):
        model.factor = factor
        assert torch.equal(split(x)["loss"], model(x)["loss"])
    model.layers[0].register_forward_hook(lambda m, a, r: r * 2)
    assert torch.equal(split(x)["loss"], model(x)["loss"])
    assert len(split.functions) == 3


def hooked(*factors: float) -> Small:
    """Each hook has a handle of its own in the process."""
    model = Small(layers=2)
    for factor in factors:
        model.layers[0].register_forward_hook(lambda m, a, r, by=factor: r * by + 1)
        model.layers[1].register_forward_pre_hook(lambda m, a, by=factor: (a[0] + by,))
    return model


def test_a_model_with_hooks_is_found_whatever_was_hooked_before() -> None:
    assert outcome(hooked(2.0, 3.0)) == "made and kept"
    assert outcome(hooked(2.0, 3.0)) == FOUND
    assert outcome(hooked(3.0, 2.0)) == "made and kept"
    assert outcome(hooked(2.0)) == "made and kept"
    only_last = hooked(2.0, 3.0)
    del only_last.layers[0]._forward_hooks[next(iter(only_last.layers[0]._forward_hooks))]
    assert outcome(only_last) == "made and kept"


def test_hooks_that_were_found_are_guarded() -> None:
    """By this process's handles: what a hook is given and when it runs hangs on them."""
    outcome(hooked(2.0, 3.0))
    model, x = hooked(2.0, 3.0).eval(), torch.ones(2, 4)
    outcome(model)
    split = autosplit.split(model, fullgraph=True)
    assert torch.equal(split(x)["loss"], model(x)["loss"])
    first = next(iter(model.layers[0]._forward_hooks))
    model.layers[0]._forward_hooks_always_called[first] = True
    assert torch.equal(split(x)["loss"], model(x)["loss"])
    assert len(split.functions) == 2


@pytest.mark.parametrize("library", [torch, autosplit])
def test_another_version_is_another_call(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Small):
        __module__ = "autosplit.somewhere"

    model = Own()
    outcome(model)
    monkeypatch.setattr(library, "__version__", "0.0.1", raising=False)
    assert outcome(model) != FOUND


def test_another_class_of_the_same_name_is_another_call() -> None:
    def built(factor: int) -> nn.Module:
        class Inner(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * factor

        class Outer(Small):
            def forward(self, x: Tensor) -> dict[str, Tensor]:
                return {"loss": self.inner(self.layers(x)).sum()}

        model = Outer()
        model.inner = Inner()
        return model

    assert outcome(built(2)) == "made and kept"
    assert outcome(built(2)) == FOUND
    assert outcome(built(3)) == "made and kept"


def calls(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of calls: the archives of graphs are larger."""
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_size)[:1]


@pytest.mark.parametrize("data", [b"", b"nonsense", None])
def test_a_damaged_file_is_a_miss(data: bytes | None, folder: pathlib.Path) -> None:
    outcome(Small())
    path = calls(folder)[0]
    if data is None:
        path.write_bytes(path.read_bytes()[:-10])
    else:
        assert FileStore(folder).write(path.name, data)
    assert outcome(Small()).startswith("found; traced to look it up (")
    assert outcome(Small()) == FOUND


def test_a_call_whose_graphs_are_gone_is_traced(folder: pathlib.Path) -> None:
    outcome(Small())
    for path in folder.iterdir():
        if path not in calls(folder):
            path.unlink()
    assert outcome(Small()) == "made and kept"
    assert outcome(Small()) == FOUND


def test_several_may_keep_one_call_at_once(folder: pathlib.Path) -> None:
    outcome(Small())
    path = calls(folder)[0]
    store, whole = FileStore(folder), FileStore(folder).read(path.name)
    assert whole is not None
    writers = [threading.Thread(target=store.write, args=(path.name, whole)) for _ in range(8)]
    for writer in writers:
        writer.start()
    seen = {store.read(path.name) for _ in range(50)}
    for writer in writers:
        writer.join()
    assert seen == {whole}
    assert outcome(Small()) == FOUND


def test_why_a_call_is_traced_is_said_and_counted() -> None:
    class Drawing(Small):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator(torch.get_default_device())

    before = counters["autosplit"]["call_bypass"]
    outcome(Drawing())
    assert outcome(Drawing()) == ("found; traced to look it up (a Generator hangs on the module)")
    assert counters["autosplit"]["call_bypass"] == before + 2


def test_what_tracing_warns_of_is_said_again() -> None:
    class Deprecated(Small):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.layers(x).T.sum() + x.sum(0).T.sum()}

    model, told = Deprecated(), []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            autosplit.split(model, fullgraph=True)(torch.ones(2, 4))
        told.append([(str(each.message), each.category) for each in caught])
    assert told[0] == told[1] != []
