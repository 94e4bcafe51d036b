"""Weight gradients that add into ``.grad`` inside the graph: when, and what comes of it."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autosplit
from autosplit import SplitError, SplitModule
from autosplit.autograd.delivery import Delivery
from tests.gradients import assert_rounded
from tests.operators import Operators
from tests.zoo import CASES, Case

INSIDE = {"addmm_", "baddbmm_", "index_add_"}


def weights(split: SplitModule, count: int | None = None) -> Counter[str]:
    """The operators that computing weight gradients runs."""
    with Operators() as operators:
        split.backward_weight(count)
    return operators.counts


def backward(module: nn.Module, case: Case, batches: list[Tensor]) -> None:
    for batch in batches:
        case.loss(module(batch)).backward()


@pytest.mark.parametrize("name", ["transformer", "tied", "repeated", "convolutions", "bfloat16"])
def test_equals_autograd_but_for_rounding(name: str) -> None:
    case = CASES[name]
    model = case.build()
    plain = copy.deepcopy(model)
    split = autosplit.split(model, accumulation="fused", max_pending=math.inf)
    batches = [case.batch() for _ in range(3)]
    backward(split, case, batches)
    assert not INSIDE & weights(split, 1).keys()  # there is nothing to add into yet
    counts = weights(split)
    assert INSIDE & counts.keys()
    assert "_foreach_add_" not in counts
    backward(plain, case, batches)
    assert_rounded(model, plain)


def test_tied_weights_add_both_contributions() -> None:
    """The embedding's rows and the head's product, one after the other, in one table's sum."""
    case = CASES["tied"]
    model = case.build()
    split = autosplit.split(model, (case.batch(),), accumulation="fused")
    backward(split, case, [case.batch()])
    split.backward_weight()
    table = model.embed.weight.grad.data_ptr()
    backward(split, case, [case.batch()])
    counts = weights(split)
    assert counts["addmm_"] == 2  # of the table and of the layer between
    assert counts["index_add_"] == 1
    assert model.embed.weight.grad.data_ptr() == table


def test_what_the_input_gradients_made_already_is_added_too() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    split = autosplit.split(model, memory="lean", accumulation="fused", max_pending=math.inf)
    case = Case(lambda: model, lambda: torch.randn(64, 8))
    batches = [case.batch() for _ in range(3)]
    backward(split, case, batches)
    split.backward_weight(1)
    counts = weights(split)
    early = len(split.functions[0].early_parameters)
    assert early
    assert counts["_foreach_add_"] == 2
    assert counts["addmm_"] > 0
    backward(plain, case, batches)
    assert_rounded(model, plain)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.held = torch.randn(4, 3)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.sin(self.one(x)) * self.held)


class Computed(Pair):
    """A weight that is computed, so that W reads the parameter and the constant."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.two.weight.sin() * self.held[1:]
        return F.linear(torch.sin(self.one(x)), weight, self.two.bias)


def no_gradient(model: Pair, x: Tensor) -> None:
    model.two.bias.grad = None


def other_dtype(model: Pair, x: Tensor) -> None:
    model.one.weight.grad = None
    model.one.weight.grad_dtype = torch.float64
    model.one.weight.grad = torch.ones(3, 3, dtype=torch.float64)


def sparse(model: Pair, x: Tensor) -> None:
    model.one.weight.grad = torch.eye(3).to_sparse()


def turned(model: Pair, x: Tensor) -> None:
    model.two.weight.grad = torch.randn(3, 3, generator=torch.manual_seed(3)).t()


def one_for_two(model: Pair, x: Tensor) -> None:
    model.two.weight.grad = model.one.weight.grad


def overlapping(model: Pair, x: Tensor) -> None:
    memory = torch.ones(4, 3)
    model.one.weight.grad, model.two.weight.grad = memory[:3], memory[1:]


def input_of_the_model(model: Pair, x: Tensor) -> None:
    model.one.weight.grad = x.detach()[:3]


def weight_itself(model: Pair, x: Tensor) -> None:
    model.two.weight.grad = model.two.weight.detach()


def constant(model: Pair, x: Tensor) -> None:
    model.two.weight.grad = model.held[1:]


def parameter_as_gradient(model: Pair, x: Tensor) -> None:
    model.one.weight.grad = nn.Parameter(torch.ones(3, 3), requires_grad=False)


def hook(model: Pair, x: Tensor) -> Any:
    return model.one.weight.register_hook(lambda grad: grad * 2)


def late_hook(model: Pair, x: Tensor) -> Any:
    return model.two.bias.register_post_accumulate_grad_hook(
        lambda weight: setattr(weight, "grad", weight.grad * 2)
    )


FALLBACKS = [
    no_gradient,
    sparse,
    turned,
    one_for_two,
    overlapping,
    input_of_the_model,
    weight_itself,
    constant,
    parameter_as_gradient,
    hook,
    late_hook,
    pytest.param(  # leaves its dtype behind
        other_dtype,
        marks=pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="no grad_dtype"),
    ),
]


@pytest.fixture(scope="module")
def computed() -> dict[str, SplitModule]:
    model = Computed()
    return {
        each: autosplit.split(copy.deepcopy(model), accumulation=each)
        for each in ("exact", "fused")
    }


@pytest.mark.parametrize("disturb", FALLBACKS)
def test_whole_gradients_where_the_graph_must_not_add(
    disturb: Callable[[Pair, Tensor], Any], computed: dict[str, SplitModule]
) -> None:
    """The bits of the exact form; what is disturbed is so between F and I."""
    x, found, state = torch.randn(4, 3), {}, copy.deepcopy(computed["exact"].state_dict())
    for accumulation, split in computed.items():
        mine: Any = split.unsplit
        mine.load_state_dict(state)
        mine.zero_grad()
        batch = x.clone().requires_grad_() + 0  # computed: W reads it where it is
        for disturbed in (False, True):
            loss = split(batch).square().sum()
            handle = disturb(mine, batch) if disturbed else None
            loss.backward()
            counts = weights(split)
            if handle is not None:
                handle.remove()
        assert "addmm_" not in counts
        found[accumulation] = [parameter.grad for parameter in mine.parameters()]
    for fused, exact in zip(found["fused"], found["exact"], strict=True):
        assert torch.equal(fused.to_dense(), exact.to_dense())


def test_sums_that_are_parts_of_one_buffer() -> None:
    model = Pair()
    plain = copy.deepcopy(model)
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
    parts = buffer.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    x = torch.randn(4, 3)
    split = autosplit.split(model, (x,), accumulation="fused")
    with Operators() as operators:  # somebody holds them: computed in the backward
        split(x).square().sum().backward()
    assert operators.counts["addmm_"] == 2
    plain(x).square().sum().backward()
    assert_rounded(model, plain)
    assert buffer.abs().min() > 0


def test_reducers_get_whole_gradients(tmp_path: Any) -> None:
    distributed = torch.distributed
    split = autosplit.split(nn.Linear(3, 2), accumulation="fused")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for _ in range(2):
            split(torch.randn(4, 3)).square().sum().backward()
        assert "addmm_" in weights(split)
        parallel = nn.parallel.DistributedDataParallel(split)
        with parallel.no_sync():
            parallel(torch.randn(4, 3)).square().sum().backward()
        assert "addmm_" not in weights(split)
    finally:
        distributed.destroy_process_group()


def test_what_w_has_read_dies_while_it_runs() -> None:
    """Nobody else holds what I handed over, also where it was compared with the sums."""
    split = autosplit.split(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), accumulation="fused"
    )
    alive: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            alive.append(sum(reference() is not None for reference in references))
            return func(*args, **(kwargs or {}))

    references: list[weakref.ref[Tensor]] = []

    class Watched(Delivery):
        def __call__(self, microbatches: Sequence[Any], slots: Any) -> None:
            ((work,),) = microbatches
            references[:] = [weakref.ref(each) for each in work.deferred.tensors]
            del work
            alive.clear()
            with Watch():
                super().__call__(microbatches, slots)

    split._queue.deliver = Watched(split._accumulation)
    for _ in range(2):
        split(torch.randn(5, 8)).square().sum().backward()
        split.backward_weight()
    assert alive[-1] < alive[0] == len(references)


def test_copies_add_alike() -> None:
    split = autosplit.split(nn.Linear(3, 2), accumulation="fused")
    for twin in (copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        twin.capture(torch.randn(4, 3))
        for _ in range(2):
            twin(torch.randn(4, 3)).square().sum().backward()
        assert weights(twin)["addmm_"] == 1


def test_in_parts_products_add() -> None:
    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    model = Branch(3, 2)
    plain = copy.deepcopy(model)
    split = autosplit.split(model, accumulation="fused")
    case = Case(lambda: model, lambda: torch.randn(4, 3))
    batches = [case.batch() for _ in range(2)]
    backward(split, case, batches)
    assert weights(split)["addmm_"] == 1
    backward(plain, case, batches)
    assert_rounded(model, plain)


def test_compiled_sums_count_as_written() -> None:
    """Autograd refuses a graph that has saved a ``.grad`` which was added to since."""
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    split = autosplit.split(model, backend="inductor", accumulation="fused")
    case = Case(lambda: model, lambda: torch.randn(4, 3))
    batches = [case.batch() for _ in range(2)]
    functions = split.capture(batches[0])
    assert "backward_weight_accumulating" in functions.generated
    backward(split, case, batches[:1])
    split.backward_weight()
    factor = torch.ones(2, 3, requires_grad=True)
    product = (factor * model.weight.grad).sum()
    backward(split, case, batches[1:])
    split.backward_weight()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    backward(plain, case, batches)
    assert_rounded(model, plain)


def test_unknown_accumulation() -> None:
    known = "'exact', 'fused'"
    with pytest.raises(SplitError, match=f"unknown accumulation 'sum'; known ones: {known}"):
        autosplit.split(nn.Linear(3, 2), accumulation="sum")
