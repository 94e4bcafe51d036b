"""The graphs compiled by Inductor: the same gradients, the same contracts."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import re
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import codecache
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.fx_passes import fuse_attention, joint_graph
from torch._inductor.lowering import lowerings
from torch._inductor.output_code import CompiledFxGraph

import autosplit
from autosplit import SplitError, Stage
from autosplit.backends.backend import backend_named
from autosplit.backends.inductor import check_strides
from autosplit.capture.joint_graph import capture
from autosplit.dynamo.pending_weights import backward_weight
from autosplit.errors import BackendError
from autosplit.passes import Kind, Role
from autosplit.passes.graph import add_placeholder, set_outputs
from autosplit.passes.subgraph import Subgraph, call_subgraph
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.schedule.schedule import Action, Schedule
from autosplit.runtime.build import split_capture
from autosplit.runtime.options import SplitOptions
from autosplit.trainer.trainer import PipelineTrainer
from tests.pipeline.trainer_options import grouped
from tests.zoo import Made, Residual

aten = torch.ops.aten

# Float32 against float64; what torch.compile meets on the same models.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

_MIXED = "0F0 0F1 1F0 1F1 1B0 0B0 1I1 1W1 0I1 0W1"
MIXED = Schedule("mixed", 2, 2, (tuple(map(Action.parse, _MIXED.split())),), (0, 0), True)

WRITTEN_OVER = re.compile(r"buf\d+ = donated_\w+; del donated_\w+ +# reuse")


def images() -> nn.Module:
    """Convolutions, for which Inductor changes strides; batch norm, which has buffers."""
    enter, leave = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
    return nn.Sequential(enter, nn.BatchNorm2d(8), nn.ReLU(), leave)


def drive(stage: Stage, batches: list[Tensor], grads: list[Tensor]) -> list[tuple[Any, Any]]:
    """Every microbatch is pending before the first weight gradient; (output, input gradient)."""
    outputs = [stage.forward(m, [x.clone()])[0] for m, x in enumerate(batches)]
    results = [stage.backward_input(m, [grad.clone()])[0] for m, grad in enumerate(grads)]
    for m in range(len(batches)):
        stage.backward_weight(m)
    stage.publish()
    return list(zip(outputs, results, strict=True))


@pytest.mark.parametrize(
    ("build", "shape"),
    [(lambda: Residual(12), (5, 12)), (images, (2, 3, 6, 6))],
    ids=["block", "images"],
)
def test_gradients_are_those_of_float64(build: type[nn.Module], shape: tuple[int, ...]) -> None:
    model = build()
    exact = copy.deepcopy(model).double()
    batches = [torch.randn(shape) for _ in range(2)]
    stage = Stage(model, [batches[0].clone().requires_grad_()], backend="inductor")
    grads = [torch.randn(stage.output_specs[0][0]) for _ in batches]
    for (output, result), x, grad in zip(drive(stage, batches, grads), batches, grads, strict=True):
        leaf = x.double().requires_grad_()
        expected = exact(leaf)
        expected.backward(grad.double())
        torch.testing.assert_close(output.double(), expected, **CLOSE)
        torch.testing.assert_close(result.double(), leaf.grad, **CLOSE)
    for (name, mine), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad.double(), theirs.grad, **CLOSE, msg=name)
    for (name, mine), theirs in zip(model.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), **CLOSE, msg=name)


def test_w_is_compiled_before_i_first_runs() -> None:
    """Their kernels are compiled at the same time."""
    x = torch.randn(5, 12, requires_grad=True)
    split = autosplit.split(Residual(12), backend="inductor")
    output = split(x).sum()
    (functions,) = split.functions
    assert {*functions.generated} == {"forward"}
    output.backward()
    assert split.pending == 1
    assert {*functions.generated} == {"forward", "backward_input", "backward_weight"}


def test_w_and_b_of_a_deferred_backward_are_compiled_once() -> None:
    """And W takes what Inductor laid out in F, with no I in between."""
    model = images()
    exact = copy.deepcopy(model).double()
    batches = [torch.randn(2, 3, 6, 6) for _ in range(4)]
    stage = Stage(model, [batches[0]], backend="inductor", defer_whole_backward=True)
    ((shape, _, _),) = stage.output_specs
    grad = torch.full(shape, 0.1)
    for microbatch, batch in enumerate(batches):
        stage.forward(microbatch, [batch.clone()])
        if microbatch % 2:
            stage.backward(microbatch, [grad.clone()])
            continue
        stage.backward_input(microbatch, [grad.clone()])
        stage.backward_weight(microbatch)
    stage.publish()
    results = {*stage.functions.generated}
    assert results == {"forward", "backward_weight", "backward_weight_accumulating"}
    for batch in batches:
        exact(batch.double()).backward(grad.double())
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, **CLOSE)


def test_backward_uses_the_mask_of_its_forward() -> None:
    """An output shows which values dropout dropped."""
    scale = nn.Parameter(torch.ones(64))
    model = Made(lambda m, x: nn.functional.dropout(x * m.scale, 0.5), scale=scale)
    split = autosplit.split(model, backend="inductor", fullgraph=True)
    leaves = [torch.rand(64).add(1).requires_grad_() for _ in range(3)]
    torch.manual_seed(3)
    first, second = split(leaves[0]), split(leaves[1])
    torch.manual_seed(3)
    again = split(leaves[2])
    kept = [output != 0 for output in (first, second, again)]
    assert torch.equal(kept[0], kept[2])
    assert not torch.equal(kept[0], kept[1])
    second.sum().backward()
    first.sum().backward()
    for leaf, mask in zip(leaves[:2], kept[:2], strict=True):
        assert torch.equal(leaf.grad, 2.0 * mask)
    split.backward_weight()
    expected = sum(2.0 * mask * leaf.detach() for leaf, mask in zip(leaves, kept[:2], strict=False))
    torch.testing.assert_close(model.scale.grad, expected)


def test_identical_stages_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 12)
    earlier = []
    headers: list[int] = []
    for model in (Residual(12), nn.Sequential(Residual(12))):  # under other names
        earlier.append(dict(counters["inductor"]))
        stage = Stage(model, [x.clone().requires_grad_()], backend="inductor")
        drive(stage, [x], [torch.randn(5, 12)])
        # As in another process, torch finds the kernels as files. No file needs a header then.
        CppPythonBindingsCodeCache.cache.clear()
        monkeypatch.setattr(
            codecache, "_precompile_header", lambda *args, **_: headers.append(args)
        )
    assert not headers
    after = dict(counters["inductor"])
    assert after["fxgraph_cache_hit"] - earlier[1].get("fxgraph_cache_hit", 0) == 3  # F, I, W
    assert after.get("fxgraph_cache_miss") == earlier[1].get("fxgraph_cache_miss")
    artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None
    assert len(artifacts[1].inductor_artifacts) >= 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"split_backward": True},
            {"forward", "backward_input", "backward_weight", "backward_weight_accumulating"},
        ),
        (
            {"schedule": MIXED},
            {"forward", "backward", "backward_input", "backward_weight_accumulating"},
        ),
    ],
    ids=["split", "mixed"],
)
def test_a_trainer_compiles_what_its_schedule_runs_before_it_runs_it(
    options: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm and bias gradients come from I and are added after it, so it has one form. Whatever
    comes first makes gradients and never adds.
    """
    running: list[set[str]] = []
    run = Executor.run

    def seen(self: Executor, *args: Any) -> list[Tensor]:
        running.append(set(engine.stages[1].functions.generated))
        return run(self, *args)

    monkeypatch.setattr(Executor, "run", seen)
    models = [Residual(12), Residual(12)]
    exact = copy.deepcopy(nn.Sequential(*models)).double()
    sgd = partial(torch.optim.SGD, lr=0.1)
    with PipelineTrainer(
        models,
        nn.functional.mse_loss,
        sgd,
        microbatches=2,
        ranks=1,
        **grouped(backend="inductor", **options),
    ) as engine:
        x, y = torch.randn(4, 12), torch.randn(4, 12)
        engine.forward_backward((x, y))
        assert running == [expected]
        assert set(engine.stages[1].functions.generated) == expected
    nn.functional.mse_loss(exact(x.double()), y.double()).backward()
    results = [p for model in models for p in model.parameters()]
    for mine, theirs in zip(results, exact.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, **CLOSE)


def test_constant_tensors_are_read_at_every_call() -> None:
    model = Made(lambda m, x: (x * m.factor, 7), factor=torch.tensor(2.0))
    split = autosplit.split(model, backend="inductor", fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    output, number = split(x)
    assert number == 7
    model.factor.fill_(5.0)
    torch.testing.assert_close(split(x)[0], 2.5 * output)


class SingleProduct(nn.Module):
    """A product in float32, as attention with dropout computes it under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            product = x @ x.mT
        return self.linear(product)


def test_products_that_autocast_leaves_in_float32_are_compiled_under_autocast() -> None:
    module, x = SingleProduct(), torch.randn(3, 5, 4)
    split = autosplit.split(module, backend="inductor")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = split(x)
        torch.testing.assert_close(output, module(x))
    expected = torch.autograd.grad(module(x).sum(), module.linear.weight)[0]
    output.sum().backward()
    split.backward_weight()
    torch.testing.assert_close(module.linear.weight.grad, expected, atol=0.02, rtol=0.02)


def test_as_a_backend_of_torch_compile() -> None:
    model = nn.Linear(12, 6)
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(
        model, backend="autosplit", dynamic=True, options={"backend": "inductor"}
    )
    for rows in (5, 9):
        x = torch.randn(rows, 12, requires_grad=True)
        leaf = x.detach().double().requires_grad_()
        compiled(x).square().mean().backward()
        exact(leaf).square().mean().backward()
        torch.testing.assert_close(x.grad.double(), leaf.grad, **CLOSE)
    backward_weight(model)
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).double(), exact(leaf), **CLOSE)


def test_of_two_open_sizes_only_their_product_crosses() -> None:
    """Rows and columns of a batch are one dimension of what W takes."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    module = torch.compile(model, backend="autosplit", options={"backend": "inductor"})
    for shape in ((2, 8), (3, 9), (4, 13)):
        batch = torch.randn(*shape, 8)
        for network in (module, plain):
            network(batch).square().mean().backward()
    backward_weight(model)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_compiling_for_a_call_that_there_is_not() -> None:
    stage = Stage(Residual(12), [torch.randn(5, 12, requires_grad=True)])
    with pytest.raises(SplitError, match="unknown call 'weight'; expected one of 'forward'"):
        stage.compile(["weight"])


def test_backward_writes_over_what_the_forward_saved_for_it() -> None:
    module = nn.Sequential(nn.Linear(12, 24), nn.GELU())
    stage = Stage(module, [torch.randn(5, 12, requires_grad=True)], backend="inductor")
    stage.compile(["backward_input", "backward"])
    for graph in ("backward_input", "backward"):
        assert WRITTEN_OVER.search(stage.functions.generated[graph]), graph


def test_retained_and_hooked_values_survive_the_backward() -> None:
    """I writes over what was saved; a second backward, and hooks, find it as it was."""
    module = nn.Sequential(nn.Linear(12, 24), nn.GELU())
    plain = copy.deepcopy(module)
    split = autosplit.split(module, backend="inductor")
    x = torch.randn(5, 12, requires_grad=True)
    seen: list[tuple[Tensor, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append((tensor, tensor.clone()))
        return tensor

    for hooked in (False, True):
        results = []
        for network in (split, plain):
            with contextlib.ExitStack() as stack:
                if hooked and network is split:
                    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept)
                    stack.enter_context(hooks)
                y = network(x)
            twice = [
                torch.autograd.grad(y.sum(), x, retain_graph=keep)[0] for keep in (True, False)
            ]
            assert torch.equal(*twice)
            results.append(twice[0])
        torch.testing.assert_close(*results, **CLOSE)
    assert seen
    assert all(torch.equal(tensor, earlier) for tensor, earlier in seen)


@pytest.mark.parametrize("blocks", [1, 3])
def test_values_that_hooks_lay_out_anew_get_their_strides_back(blocks: int) -> None:
    """Generated code does not assert strides that guards and earlier graphs guarantee."""
    model = nn.Sequential(*(Image(0) for _ in range(blocks)))
    plain = copy.deepcopy(model)
    split = autosplit.split(model, backend="inductor")
    x = torch.randn(2, 4, 6, 6)
    moved = []

    def pack(tensor: Tensor) -> Tensor:
        other = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
        moved.append(other.stride() != tensor.stride())
        return other

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        split(x).square().sum().backward()
    split.backward_weight()
    plain(x).square().sum().backward()
    assert any(moved)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    for source in split.functions[0].generated.values():
        assert not re.search(r"assert_size_stride\((input|donated)", source)


def test_a_block_is_compiled_for_the_strides_of_all_its_calls() -> None:
    inner, outer = fx.Graph(), fx.Graph()
    x = add_placeholder(inner, "x", torch.zeros(2, 3), Role(Kind.INPUT, "x"))
    y = inner.call_function(aten.sin.default, (x,))
    set_outputs(inner, [(Role(Kind.OUTPUT, "y"), y)], {y: y})
    block = Subgraph("block", fx.GraphModule({}, inner), {})
    calls = []
    for name, value in (("a", torch.zeros(2, 3)), ("b", torch.zeros(3, 2).T)):
        argument = add_placeholder(outer, name, value, Role(Kind.INPUT, name))
        (result,) = call_subgraph(outer, block, [argument], [torch.zeros(2, 3)])
        calls.append(result.args[0])
    check_strides(calls[0])
    expected = r"strides \(3, 1\) of x, and another call passes \(1, 2\)"
    with pytest.raises(BackendError, match=expected):
        check_strides(calls[1])


def test_inputs_of_open_sizes_are_asserted() -> None:
    split = autosplit.split(nn.Linear(3, 2))
    for rows in (4, 5):
        split(torch.randn(rows, 3))
    fixed, varying = split.functions
    assert [fixed._backend.asserts_inputs, varying._backend.asserts_inputs] == [False, True]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.11's autotuning uses it
def test_cuda_graphs_of_its_own_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would write one microbatch's results over the last one's, which are pending."""
    from autosplit.torch_internals import inductor  # which takes seconds to import

    switched: list[bool] = []
    tuned: list[bool] = []
    compile_fx_inner: Any = inductor.compile_fx_inner

    def spy(*args: Any, **kwargs: Any) -> Any:
        switched.append(torch._inductor.config.triton.cudagraphs)
        tuned.append(torch._inductor.config.max_autotune)
        return compile_fx_inner(*args, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx_inner", spy)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        for mode in ("default", "max-autotune"):
            model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
            x = torch.randn(2, 3)
            split = autosplit.split(model, backend="inductor", mode=mode)
            split.capture(x)
            torch.testing.assert_close(split(x), model(x))
    assert not any(switched)
    assert tuned == [False] * 3 + [True] * 3


def test_inductors_bookkeeping_runs_under_a_profiler_only(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[CompiledFxGraph] = []
    enter = CompiledFxGraph.__call__

    def spy(graph: CompiledFxGraph, args: Any) -> Any:
        entries.append(graph)
        return enter(graph, args)

    monkeypatch.setattr(CompiledFxGraph, "__call__", spy)
    split = autosplit.split(Residual(12), backend="inductor")
    split(torch.randn(5, 12)).sum().backward()
    split.backward_weight()
    assert not entries
    with torch.profiler.profile() as profile:
        split(torch.randn(5, 12))
    assert len(entries) == 1
    assert any("CompiledFxGraph" in event.key for event in profile.key_averages())


def test_torch_compile_passes_its_mode_on() -> None:
    compiled = torch.compile(nn.Linear(3, 3), backend="autosplit", mode="reduce-overhead")
    with pytest.raises(BackendCompilerFailed, match="'reduce-overhead' is refused"):
        compiled(torch.randn(2, 3))


def test_graphs_are_compiled_without_waiting_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """F, I and two forms of W are compiled although no kernel ever is; the first call names a
    kernel. The kernels of a block and of the operators around it share a file, and Python collects
    once for each graph, not for each block.
    """
    from autosplit.torch_internals import kernel_files

    files: list[int] = []

    def fail() -> Any:
        raise RuntimeError("no space left")

    def load(source: str, submit_fn: Any) -> Any:
        files.append(source.count("PyMODINIT_FUNC"))
        return fail

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", load)
    monkeypatch.setattr(kernel_files, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(kernel_files, "_FILE", 10**6)
    collect = mock.Mock(wraps=gc.collect)
    monkeypatch.setattr(gc, "collect", collect)
    model = nn.Sequential(*map(Residual, (11, 11, 11)), nn.Tanh())
    stage = Stage(model, [torch.randn(5, 11, requires_grad=True)], backend="inductor")
    stage.compile()
    kernels = [code.count("cpp_pybinding(") for code in stage.functions.generated.values()]
    assert len(files) == 4 < len(kernels)
    assert collect.call_count <= 4 * len(files)  # twice after each of two phases
    assert sum(files) == sum(kernels)
    expected = r"cannot compile the kernel cpp_\w+ \(RuntimeError: no space left\)"
    with pytest.raises(BackendError, match=expected):
        stage.forward(0, [torch.randn(5, 11)])


@pytest.mark.parametrize("is_logged", [False, True])
def test_cache_keys_are_described_for_logs(
    monkeypatch: pytest.MonkeyPatch, *, is_logged: bool
) -> None:
    described: list[Any] = []
    describe = lambda _, details: described.append(details) or []  # noqa: E731
    monkeypatch.setattr(codecache.FxGraphCachePickler, "debug_lines", describe)
    log = logging.Logger("keys", logging.DEBUG if is_logged else logging.INFO)
    monkeypatch.setattr(codecache, "log", log)
    autosplit.split(nn.Linear(3, 3), backend="inductor")(torch.randn(2, 3))
    assert bool(described) == is_logged


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT / 2).softmax(-1) @ x


@pytest.mark.parametrize("model", [nn.Linear(4, 4), Attention()], ids=lambda m: type(m).__name__)
def test_patterns_of_attention_are_loaded_for_attention(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(fuse_attention, "_sfdp_init", loaded.append)
    joint_graph.lazy_init.cache_clear()
    backend = backend_named("inductor")
    x = torch.randn(2, 3, 4, requires_grad=True)
    split_capture(capture(model, (x,), {}, backend.decompositions), backend, SplitOptions())
    joint_graph.lazy_init.cache_clear()
    assert bool(loaded) == isinstance(model, Attention)


class Odd(torch.autograd.Function):
    """Its backward has an operator that Inductor cannot compile in the test below."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.lgamma(grad.abs() + 1)


class Image(nn.Module):
    """Convolutions, for which Inductor changes strides; the last two blocks call ``Odd``."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.norm, self.is_odd = nn.BatchNorm2d(8), index > 1

    def forward(self, x: Tensor) -> Tensor:
        between = self.norm(self.enter(x)).relu()
        return x + self.leave(Odd.apply(between) if self.is_odd else between.cos())


def test_a_graph_that_inductor_cannot_compile_runs_alone_operator_by_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(x: Any) -> Any:
        raise NotImplementedError("no kernel\nfor this")

    monkeypatch.setitem(lowerings, torch.ops.aten.lgamma.default, fail)
    model = nn.Sequential(*map(Image, range(4)))
    exact = copy.deepcopy(model).double()
    batches = [torch.randn(2, 4, 6, 6) for _ in range(2)]
    stage = Stage(model, [batches[0].clone().requires_grad_()], backend="inductor")
    grads = [torch.randn(2, 4, 6, 6) for _ in batches]
    line = r"compile aten\.lgamma\.default of .*test_inductor\.py:\d+ return torch\.lgamma.*"
    reason = r"\(NotImplementedError: no kernel\). The backward_input_Image_1_backward_input graph"
    with pytest.warns(UserWarning, match=line + reason) as issued:
        results = drive(stage, batches, grads)
    assert len(issued) == 1
    names = {*stage.functions.generated}
    assert {n for n in names if n.startswith("backward_input")} == {
        "backward_input_Image_0_backward_input"
    }
    assert {"forward_Image_1_forward", "backward_weight_Image_1_backward_weight"} <= names
    for (_, result), x, grad in zip(results, batches, grads, strict=True):
        leaf = x.double().requires_grad_()
        exact(leaf).backward(grad.double())
        torch.testing.assert_close(result.double(), leaf.grad, rtol=1e-3, atol=1e-4)
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4)
