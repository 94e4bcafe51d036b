"""Models split in parts: reports, refusals, and the warning that little can wait."""

from __future__ import annotations

import pathlib
import warnings

import pytest
import torch
from torch import Tensor, nn

import autosplit
from autosplit import DeferralWarning, SplitError
from autosplit.dynamo.partial_model import PartialModel
from autosplit.passes import PassError
from autosplit.runtime import build
from tests.dynamo.breaking import DisabledMiddle, TwoLayers, Unbreakable
from tests.dynamo.by_graphs import partial_of, split_by_graphs

# --- what a partly split model says of itself -----------------------------------------------------


PRODUCT = 2 * 3 * 4 * 4  # operations of one weight gradient: 3 rows, 4 by 4 weights


def called(model: nn.Module) -> PartialModel:
    module = split_by_graphs(model)
    module(torch.randn(3, 4)).sum().backward()
    module.backward_weight()
    return partial_of(module)


def test_parts_and_breaks() -> None:
    model = DisabledMiddle()
    partial = called(model)
    first, second = partial.parts
    assert (first.state, first.parameters) == ("split", ("a.weight", "a.bias"))
    assert (second.state, second.parameters) == ("split", ("b.weight", "b.bias"))
    assert first.weight_flops == second.weight_flops == (PRODUCT, 0)
    assert partial.calls == {first: 1, second: 1}
    (result,) = partial.breaks
    assert result.reason == "Skip inlining `torch.compiler.disable()`d function"
    assert "breaking.py:" in result.line
    assert result.line.endswith("return self.b(self.untraceable(self.a(x).relu()))")
    number = result.line.split(" ")[0].rpartition(":")[2]
    assert first.lines.startswith("breaking.py:")
    assert number in first.lines
    assert {*partial.deferred_parameters} == {*model.a.parameters(), *model.b.parameters()}
    assert {*partial.ordinary_parameters} == {*model.middle.parameters()}
    text = partial.report()
    assert "DisabledMiddle is split graph by graph: Dynamo found 2, 2 of them split." in text
    assert "Skip inlining `torch.compiler.disable()`d function" in text
    assert "middle.weight" in text
    assert (
        "Deferred: the gradients of 4 of 6 parameters, 66.7 % of the weight gradients' elements."
        in text
    )


def test_function_that_dynamo_gives_up_on() -> None:
    partial = called(Unbreakable())
    (result,) = partial.breaks
    assert result.line.endswith("torch._dynamo.graph_break()")
    assert result.reason.endswith("all of forward runs without a graph")
    text = partial.report()
    assert "Dynamo found 0, 0 of them split" in text
    assert "0 of 4 parameters, 0.0 %" in text


def test_lines_of_torchs_layers_are_named_where_there_are_none_of_the_users() -> None:
    model = autosplit.split(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)))
    with pytest.warns(DeferralWarning, match=r"because .*batchnorm\.py:\d+"):
        model(torch.randn(4, 2)).sum().backward()
    assert "\nbatchnorm.py:" in str(model.report())


def test_recompilation_limit_is_reported() -> None:
    model = TwoLayers()
    module = split_by_graphs(model)
    with torch._dynamo.config.patch(recompile_limit=1):
        for training in (True, False):
            model.train(training)
            for frozen in (False, True):
                model.a.weight.requires_grad_(not frozen)
                module(torch.randn(3, 4)).sum().backward()
                module.backward_weight()
    breaks = partial_of(module).breaks
    assert any("recompile limit" in graph_break.reason for graph_break in breaks)
    assert "recompile limit" in module.report()


def test_graph_that_cannot_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, **options: object) -> None:
        raise PassError("no pass likes this graph")

    monkeypatch.setattr(build, "run", fail)
    partial = called(TwoLayers())
    assert [part.state for part in partial.parts] == ["no pass likes this graph"] * 2
    assert len(partial.ordinary_parameters) == 4
    assert "no pass likes this graph" in partial.report()
    assert "0 of 4 parameters, 0.0 %" in partial.report()


def test_dump(tmp_path: pathlib.Path) -> None:
    partial = called(TwoLayers())
    partial.dump(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part0", "part1"]
    names = sorted(path.name for path in (tmp_path / "part1").iterdir())
    assert names == [
        "backward.py",
        "backward_input.py",
        "backward_weight.py",
        "boundary.md",
        "forward.py",
        "graphs.svg",
        "joint.py",
    ]
    text = (tmp_path / "part1" / "backward_weight.py").read_text()
    assert "aten.mm.default" in text
    assert "parameter_grad b.weight" in text


def test_nothing_captured() -> None:
    with pytest.raises(SplitError, match=r"split graph by graph; a test asks for graphs\nMore: "):
        split_by_graphs(TwoLayers()).report()


class ViewOutside(nn.Module):
    """The weight of two products enters the second graph as two views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(2, 4, 4))

    def parts(self) -> tuple[Tensor, ...]:
        return self.weight.view(8, 4).chunk(2)

    def forward(self, x: Tensor) -> Tensor:
        h, parts = self.a(x), self.parts()
        torch._dynamo.graph_break()
        for part in parts:
            h = h @ part
        result: Tensor = self.b(h)
        return result


class ViewUntraced(ViewOutside):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(item.t() for item in self.weight)


@pytest.mark.parametrize("kind", [ViewOutside, ViewUntraced])
def test_products_for_weights_that_enter_as_views_do_not_wait(kind: type[ViewOutside]) -> None:
    model = kind()
    partial = called(model)
    assert [*partial.ordinary_parameters] == [model.weight]
    assert "55.6 % of the weight gradients'" in partial.report()


# --- a module of which less than half can wait says so, once --------------------------------------


class Mostly(TwoLayers):
    """Both layers behind a function that runs without a graph."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def untraceable(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x))
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.untraceable(x)


class Setting(nn.Module):
    """The first call sets something, as transformers' classifiers do with labels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.kind: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "regression"
        result: Tensor = self.inner(x)
        return result


def warned(model: nn.Module, *inputs: Tensor, calls: int = 2) -> list[str]:
    split = autosplit.split(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            split(*inputs)
    return [str(warning.message) for warning in caught if warning.category is DeferralWarning]


def test_in_parts() -> None:
    (message,) = warned(Mostly(), torch.randn(3, 4))
    assert message.startswith("Mostly: 0% of the weight gradients wait for backward_weight()")
    assert "test_partial_report.py" in message
    assert "torch.compiler.disable" in message
    assert message.endswith("report() says more")


def test_in_one_graph() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    model = nn.LayerNorm(4)
    (message,) = warned(model, x)
    assert (
        "the operators that compute the gradients of weight, bias compute input gradients, too"
        in message
    )
    split = autosplit.split(model)
    split(x)
    assert "native_layer_norm_backward" in split.report().split("Not deferred")[1]


@pytest.mark.parametrize(
    "model",
    [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), DisabledMiddle(), nn.ReLU()],
)
def test_not_where_half_can_wait(model: nn.Module) -> None:
    assert not warned(model, torch.randn(3, 4, requires_grad=True))


def test_not_of_a_first_call_that_differs() -> None:
    """It runs without a graph; the calls after it do not."""
    assert not warned(Setting(nn.Linear(4, 4)), torch.randn(3, 4), calls=3)


def test_of_the_calls_after_it() -> None:
    (message,) = warned(Setting(Mostly()), torch.randn(3, 4), calls=3)
    assert "0% of the weight gradients wait" in message
