"""Split graphs kept on disk: found again where everything is equal, and only there."""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import autosplit
from autosplit.capture.cache import environment_key
from autosplit.capture.cache.archive import NoArchiveError, unpack_graphs
from autosplit.capture.cache.split_graph_cache import VARIABLE
from autosplit.passes.lowering import codegen
from autosplit.runtime.build import DUMP_VARIABLE


class Model(nn.Module):
    """Has a norm with statistics, a dropout, a view as an output and a gradient in I."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = scale
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(torch.relu(self.first(x)) * self.scale)
        y = nn.functional.dropout(self.second(x), 0.5, self.training)
        return {"y": y, "row": y[0]}


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def trace(
    model: nn.Module | None = None, x: Tensor | None = None, memory: str = "balanced"
) -> tuple[int, int, int]:
    """Split a model; how many graphs were found, not found and passed by."""
    before = counters["autosplit"].copy()
    with torch.random.fork_rng():
        model = model or Model()
        x = torch.ones(4, 8, requires_grad=True) if x is None else x
    autosplit.split(model, (x,), memory=memory)
    after = counters["autosplit"] - before
    return after["graph_hit"], after["graph_miss"], after["graph_bypass"]


HIT, MISS, BYPASS = (1, 0, 0), (0, 1, 0), (0, 0, 1)


def step(model: nn.Module) -> list[Tensor]:
    """Gradients of a step, and what else it leaves."""
    torch.manual_seed(1)
    split = autosplit.split(model)
    x = torch.randn(4, 8, requires_grad=True)
    results = split(x)
    (results["y"].square().sum() + results["row"].sum()).backward()
    split.backward_weight()
    found = [*(p.grad for p in model.parameters()), x.grad, *model.buffers(), results["y"]]
    return [tensor for tensor in found if tensor is not None]


def test_what_is_read_back_is_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphs() -> dict[str, str]:
        (functions,) = autosplit.split(Model(), (torch.ones(4, 8, requires_grad=True),)).functions
        named = functions.graphs.graphs().items()
        return {name: codegen.generate(name, module) for name, module in named}

    before = counters["autosplit"]["graph_hit"]
    assert graphs() == graphs()
    torch.manual_seed(0)
    read = step(Model())
    assert counters["autosplit"]["graph_hit"] == before + 2
    monkeypatch.setenv(VARIABLE, "0")
    torch.manual_seed(0)
    made = step(Model())
    assert len(made) == len(read) == 11
    assert all(map(torch.equal, made, read))


def frozen() -> Model:
    model = Model()
    model.second.weight.requires_grad_(False)
    return model


def tied() -> Model:
    model = Model()
    model.second.weight = model.first.weight
    return model


def one_storage() -> Model:
    model = Model()
    both = torch.zeros(16, 8)
    model.first.weight.data, model.second.weight.data = both[:8], both[8:]
    return model


OTHERS: dict[str, Callable[[], tuple[int, int, int]]] = {
    "memory": lambda: trace(memory="lean"),
    "shape": lambda: trace(x=torch.ones(5, 8, requires_grad=True)),
    "strides": lambda: trace(x=torch.ones(8, 4).t().requires_grad_()),
    "dtype": lambda: trace(Model().double(), torch.ones(4, 8).double().requires_grad_()),
    "no gradient of the input": lambda: trace(x=torch.ones(4, 8)),
    "frozen parameter": lambda: trace(frozen()),
    "one parameter twice": lambda: trace(tied()),
    "parameters of one storage": lambda: trace(one_storage()),
    "evaluation": lambda: trace(Model().eval()),
    "number in the forward": lambda: trace(Model(scale=3.0)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_graph_is_not_found(what: str) -> None:
    assert trace() == MISS
    assert OTHERS[what]() == MISS
    assert trace() == HIT
    assert OTHERS[what]() == HIT


def test_inputs_by_place_and_by_name_have_graphs_of_their_own() -> None:
    """The graphs are equal, but each names its inputs as they were given."""
    model, x = Model(), torch.ones(4, 8, requires_grad=True)
    assert trace(model, x) == MISS
    split = autosplit.split(model)
    split(x=x)["y"].sum().backward()
    split.backward_weight()
    assert model.first.weight.grad is not None
    assert [each.capture.inputs for each in split.functions] == [("x",)]
    assert trace(model, x) == HIT


def test_switches_of_torch_are_part_of_the_key() -> None:
    assert trace() == MISS
    torch.set_num_threads(2)  # the fixture of all tests puts it back
    assert trace() == MISS
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    try:
        assert trace() == MISS
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.autocast("cpu", torch.bfloat16):
        assert trace() == MISS
    assert trace() == HIT


def test_sources_are_part_of_the_key(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "sources"
    shutil.copytree(environment_key.SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment_key, "SOURCES", copy)
    assert trace() == MISS
    assert trace() == HIT
    with (copy / "passes" / "manager.py").open("a") as source:
        source.write("# changed\n")
    assert trace() == MISS


def test_every_source_is_part_of_the_key(tmp_path: pathlib.Path) -> None:
    root = pathlib.Path(autosplit.__file__).parent
    files = {*root.rglob("*.py"), *root.glob("passes/**/*.py")}  # the latter may be a link
    assert {pathlib.Path(file) for file in environment_key.source_files(root)} == files
    seen = set()
    for name in ("one.py", "deep/two.py", "deep/er/three.py", "linked/four.py"):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        (tmp_path / "root").mkdir(exist_ok=True)
        if not (tmp_path / "root" / "linked").exists():
            (tmp_path / "root" / "linked").symlink_to(tmp_path / "elsewhere")
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        seen.add(environment_key.sources(tmp_path / "root"))
        path.write_text("changed")
        seen.add(environment_key.sources(tmp_path / "root"))
    path.rename(path.with_name("moved.py"))
    seen.add(environment_key.sources(tmp_path / "root"))
    assert len(seen) == 9


@pytest.mark.parametrize("key", ["AutogradCPU", "Autograd"])
def test_a_kernel_of_somebody_elses_is_not_in_any_key(key: str) -> None:
    """Its code may change, and with it what is traced through it."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sigmoid())
    assert trace(model) == MISS
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel of torch's is overridden
            library.impl("sigmoid", lambda x: torch.relu(x), key)
        assert trace(model) == BYPASS
        split, x = autosplit.split(model), torch.randn(4, 8, requires_grad=True)
        split(x).sum().backward()
        expected = torch.autograd.grad(model(x).sum(), x)[0]
        assert torch.equal(x.grad, expected)
    finally:
        library._destroy()
    assert trace(model) == HIT


def test_what_torch_registers_for_vmap_does_not_matter() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    target = torch.zeros(3, dtype=torch.long)
    torch.vmap(nn.functional.nll_loss)(torch.ones(2, 3, 4), target.expand(2, 3))
    assert trace(model) == MISS
    assert trace(model) == HIT


class Constant(nn.Module):
    """Reads a tensor that is neither input nor state, and may be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = [torch.ones(8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask[0]


@torch.library.custom_op("autosplit_tests::kept_doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: 2 * grad)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return doubled(self.linear(x))


def test_what_a_key_cannot_tell_is_passed_by() -> None:
    assert trace(Constant()) == trace(Constant()) == BYPASS


def test_a_custom_operator_of_other_formulas_is_another_graph() -> None:
    def gradient() -> Tensor:
        model, x = Custom(), torch.ones(2, 8, requires_grad=True)
        torch.nn.init.eye_(model.linear.weight)
        autosplit.split(model)(x).sum().backward()
        assert x.grad is not None
        return x.grad

    formula = doubled._backward_fn
    assert trace(Custom()) == MISS
    assert trace(Custom()) == HIT
    assert torch.equal(gradient(), torch.full((2, 8), 2.0))
    doubled._backward_fn = lambda ctx, grad: 3 * grad
    try:
        assert trace(Custom()) == MISS
        assert torch.equal(gradient(), torch.full((2, 8), 3.0))
    finally:
        doubled._backward_fn = formula
    assert trace(Custom()) == HIT


def test_damaged_files_are_made_again(folder: pathlib.Path) -> None:
    assert trace() == MISS
    file, *_ = sorted(folder.iterdir(), key=lambda each: -each.stat().st_size)  # that of the graphs
    whole = file.read_bytes()
    for content in (b"", whole[:-1], whole[:40] + b"?" + whole[41:]):
        file.write_bytes(content)
        hits, misses, _ = trace()  # looked for by its call, and again once that was traced
        assert (hits, misses) == (0, 2)
        assert trace() == HIT


def test_nothing_but_lists_of_known_things_is_read() -> None:
    with pytest.raises(NoArchiveError, match=r"posix.system is not read|nt.system is not read"):
        unpack_graphs(pickle.dumps(os.system), None)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owner")
def test_a_folder_that_others_may_write_to_is_not_used(folder: pathlib.Path) -> None:
    assert trace() == MISS
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert trace() == MISS
    folder.chmod(0o700)
    assert trace() == HIT


def test_off(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert trace() == trace() == (0, 0, 0)
    assert not folder.exists()


def test_a_dump_shows_the_passes_at_work(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trace() == MISS
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path / "dump"))
    assert trace() == (0, 0, 0)
    assert list((tmp_path / "dump").glob("*/*_partition.*"))


class Activated(nn.Module):
    """An activation, which has no state, under a name of the caller's choice."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.add_module(name, nn.Sequential(nn.GELU(), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


def deferred(model: nn.Module) -> list[str]:
    split = autosplit.split(model, (torch.ones(4, 8, requires_grad=True),))
    rows = split.report().partition("made at")[2].splitlines()[2:]
    return [row.split()[0] for row in rows[: rows.index("")]]


def test_a_graph_from_disk_has_the_names_of_its_tensors() -> None:
    before = counters["autosplit"].copy()
    fresh, kept = deferred(Activated("act")), deferred(Activated("act"))
    assert (counters["autosplit"] - before)["graph_hit"] == 1
    assert fresh == kept
    assert "linear_dy" in fresh


def test_a_module_under_another_name_is_another_graph() -> None:
    """Its name is in the names of tensors, though it has no state."""
    assert trace(Activated("act")) == (0, 1, 0)
    assert trace(Activated("function")) == (0, 1, 0)
    assert trace(Activated("act")) == (1, 0, 0)
