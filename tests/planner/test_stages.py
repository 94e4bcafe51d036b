"""A model in stages does what it did before, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit.errors import PlanError
from autosplit.pipeline.schedule.routes import Source
from autosplit.planner import Partition, WholeModel, cut
from tests.planner.whole_models import (
    Case,
    captured,
    checkpointed,
    llama_of_three,
    llama_with_hidden_states,
    loss_of,
    mixed,
    run_modules,
    tensors_of,
    unet,
)
from tests.zoo import Made

# Mamba asks through a cached function which torch it runs on.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache")


class Experts(nn.Module):
    """Each gets as many samples as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        self.last = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        chosen = (x[:, 0] > 0).long()
        order = chosen.argsort(stable=True)
        sizes = nn.functional.one_hot(chosen, 2).sum(0).tolist()
        parts = x[order].split(sizes)
        built = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        return self.last(torch.zeros_like(x).index_add(0, order, torch.cat(built)))


class Doubled(torch.autograd.Function):
    """A gradient of its own, with what it keeps and an input without one."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(x, mask)
        return x * mask

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        x, mask = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * grad * mask * x.cos(), None


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = Doubled.apply(y, x)
        y = Doubled.apply(self.middle(y), y.detach())
        return self.last(y)


def experts() -> Case:
    return Case(Experts(), (torch.randn(6, 8),))


def with_function() -> Case:
    return Case(WithFunction(), (torch.randn(6, 8),))


CASES = [llama_with_hidden_states, unet, mixed, checkpointed, experts, with_function]


def split_of(whole: WholeModel, stages: int) -> Partition:
    count = len(whole.blocks)
    return cut(whole, [round(count * stage / stages) for stage in range(1, stages)])


def cut_before(whole: WholeModel, *names: str) -> Partition:
    return cut(*whole.divided(names))


def whole_of(case: Case) -> WholeModel:
    return WholeModel.capture(case.model, case.args, case.kwargs)


def outcome(model: nn.Module, call: Callable[[], Any]) -> tuple[Any, ...]:
    """Result, buffers and gradients of one call from the same start."""
    earlier = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(0)
    model.zero_grad()
    result = call()
    loss_of(result).backward()
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, buffer in model.named_buffers():
        buffer.copy_(earlier[name])
    return result, after, grads


@pytest.mark.parametrize("make", CASES)
def test_stages_in_a_row_are_the_model(make: Callable[[], Case]) -> None:
    case, captured_model = captured(make)
    case.model.train()
    split = split_of(captured_model, 3)
    sizes = [n for sent in captured_model.crossing for item in sent for n in item.shape]
    assert all(type(n) is int for n in sizes)
    modules = [split.build(index) for index in range(3)]
    state: dict[str, Tensor] = {}
    for module in modules:
        state |= module.state_dict(keep_vars=True)
    expected = case.model.state_dict(keep_vars=True)
    assert state.keys() == expected.keys()
    assert all(state[name] is expected[name] for name in state)
    for training in (True, False):
        for module in (case.model, *modules):
            module.train(training)
        whole = outcome(case.model, lambda: case.model(*case.args, **case.kwargs))
        parts = outcome(case.model, lambda: run_modules(split, modules, case.tensors()))
        assert type(parts[0]) is type(whole[0])
        for a, b in zip(tensors_of(parts), tensors_of(whole), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_tied_parameters_are_named_in_both_stages() -> None:
    split = split_of(captured(llama_of_three)[1], 3)
    assert split.shared == (((0, "model.embed_tokens.weight"), (2, "lm_head.weight")),)
    first, last = split.build(0), split.build(2)
    assert "lm_head.weight" not in first.state_dict()
    assert first.model.embed_tokens.weight is last.lm_head.weight


def test_skips_go_straight_to_where_they_are_read() -> None:
    split = cut_before(captured(unet)[1], "down2", "middle", "up1")
    makers = [{source.stage for source in sources} for sources in split.wiring.inputs]
    assert makers == [{None}, {0}, {0, 1}, {2}]


def test_masks_are_made_in_every_stage_and_labels_go_to_the_last() -> None:
    split = split_of(captured(llama_of_three)[1], 3)
    assert split.wiring.names == ("input_ids", "attention_mask", "labels")
    assert split.wiring.outputs == (1, 1)
    assert split.wiring.inputs == (
        (Source(None, 0), Source(None, 1)),
        (Source(None, 1), Source(0, 0)),
        (Source(None, 1), Source(None, 2), Source(1, 0)),
    )


def noisy(model: Any, x: Tensor) -> Tensor:
    """All layers add the same noise."""
    noise = torch.rand(4)
    for layer in model.layers:
        x = layer(x) + noise
    return x


class WritesMask(nn.Module):
    """Returns a tensor without a gradient that it has written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x * 1
        mask.mul_(2)
        return self.last(self.first(x)), mask


def test_writes_into_a_returned_mask_are_not_lost() -> None:
    case = Case(WritesMask(), (torch.randn(2, 4),))
    split = cut(WholeModel.capture(case.model, case.args, case.kwargs), [1])
    results = run_modules(split, [split.build(index) for index in range(2)], case.tensors())
    for result, expected in zip(results, case.model(*case.args), strict=True):
        assert torch.equal(result, expected)


def test_random_values_are_drawn_once_and_sent() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    case = Case(Made(noisy, layers=layers), (torch.randn(2, 4),))
    split = split_of(whole_of(case), 3)
    assert split.wiring.outputs == (2, 1)
    modules = [split.build(index) for index in range(3)]
    torch.manual_seed(0)
    got = run_modules(split, modules, case.tensors())
    torch.manual_seed(0)
    assert torch.equal(got, case.model(*case.args))


def switching(model: Any, x: Tensor) -> Tensor:
    """In evaluation other tensors are alive between the layers."""
    first = model.layers[0](x)
    x = model.layers[1:](first)
    return x if model.training else x + first


def test_a_mode_that_is_cut_otherwise_is_refused_when_it_runs() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    case = Case(Made(switching, layers=layers), (torch.randn(2, 4),))
    split = cut_before(whole_of(case), "layers.2")
    modules = [split.build(index) for index in range(2)]
    assert torch.equal(run_modules(split, modules, case.tensors()), case.model(*case.args))
    with pytest.raises(
        PlanError,
        match=r"cut for evaluation at the present cuts.* the stages would send each other",
    ):
        modules[0].eval()(*case.args)


def test_stages_run_in_the_mode_that_the_model_is_in_when_they_are_built() -> None:
    """As those of models that come in evaluation mode and are put into training before a loop."""
    layers = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
    case = Case(nn.Sequential(*layers).eval(), (torch.randn(6, 4),))
    split = split_of(whole_of(case), 2)
    case.model.train()
    modules = [split.build(index) for index in range(2)]
    for training in (True, False):
        for module in (case.model, *modules):
            module.train(training)
        whole = outcome(case.model, lambda: case.model(*case.args))
        parts = outcome(case.model, lambda: run_modules(split, modules, case.tensors()))
        for a, b in zip(tensors_of(parts), tensors_of(whole), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert split.build(0).training is False


def test_a_stage_refuses_another_batch_size() -> None:
    case = Case(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(6, 4),))
    stage = split_of(whole_of(case), 2).build(1)
    with pytest.raises(PlanError, match=r"shape \[2, 4\], but .* captured with \[6, 4\]"):
        stage(torch.randn(2, 4))
    with pytest.raises(PlanError, match="takes 1 tensors, got 2"):
        stage(torch.randn(6, 4), torch.randn(6, 4))


def test_cuts_that_are_none_are_refused() -> None:
    whole = WholeModel.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    for cuts in ([0], [2], [1, 1]):
        with pytest.raises(PlanError, match="from 1 to 1; got"):
            cut(whole, cuts)
    with pytest.raises(PlanError, match="from 0 to 1; got 2"):
        cut(whole, [1]).build(2)


class Placed(nn.Module):
    """Asks where its input is, under autocast for that kind of device; holds a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scale: Tensor | float = torch.full((4,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.autocast(x.device.type, enabled=False):
                steps = torch.arange(x.shape[1], device=x.device)
                x = layer(x) * self.scale + steps
        return x


def test_stages_that_are_moved_make_their_tensors_where_they_are() -> None:
    whole, firsts = WholeModel.capture(Placed(), (torch.randn(2, 4),)).divided(["layers.1"])
    stages = cut(whole, firsts)
    for index in range(2):
        stage = stages.build(index).double()
        x = torch.randn(2, 4)
        graph = stage.check_inputs([x])
        assert graph.device == torch.device("cpu")
        assert "device(type='cpu')" in graph.graph.code
        stage.to("meta")
        graph = stage.check_inputs([x])
        assert graph.device == torch.device("meta")
        constants = [*graph.graph.buffers()]
        assert constants
        assert all(constant.is_meta and constant.dtype is torch.float32 for constant in constants)
        assert "device(type='cpu')" not in graph.graph.code


def test_autocast_of_a_stage_is_that_of_the_device_to_which_it_is_moved() -> None:
    model = Placed()
    model.scale = 1.0
    x = torch.randn(2, 4)
    graph = cut(WholeModel.capture(model, (x,)), []).build(0).check_inputs([x])
    assert "autocast('cpu'" in graph.graph.code
    code = graph.moved(torch.device("cuda", 1)).graph.code
    assert "autocast('cuda'" in code
    assert "device(type='cuda', index=1)" in code
    assert "cpu" not in code
    assert "autocast('cpu'" in graph.graph.code
