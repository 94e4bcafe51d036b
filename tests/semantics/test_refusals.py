"""Refusals of a split module, and backwards other than one plain ``backward()``."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import autosplit
from autosplit import SplitError, SplitModule
from autosplit.errors import FailingCallError
from autosplit.torch_internals import TORCH
from tests.gradients import assert_same_gradients
from tests.semantics.against_autograd import assert_alike, assert_equals_autograd, assert_same


def forward_mode(split: SplitModule, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return split(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[SplitModule, Tensor], Any]] = {
    "vmap": lambda split, x: torch.func.vmap(split)(x),
    "grad": lambda split, x: torch.func.grad(lambda y: split(y).sum())(x),
    "jvp": lambda split, x: torch.func.jvp(split, (x,), (x,)),
    "forward mode": forward_mode,
}


# torch itself loads its forward-mode formulas by torch.jit.script.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "captured"), [*((name, False) for name in TRANSFORMS), ("vmap", True)]
)
def test_transforms(name: str, captured: bool) -> None:
    split = autosplit.split(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    if captured:
        split(x)
    with pytest.raises(SplitError, match=r"inside a torch\.func transform .*transform the model"):
        TRANSFORMS[name](split, x)


class Checking(nn.Module):
    """Has an opinion on its inputs, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ValueError("not a number")
        return self.linear(x)


def test_a_shape_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so as the unsplit model does, once, and later calls go as if it had not been."""
    logged: list[logging.LogRecord] = []
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(torchs, "handle", lambda r: logged.append(r) if torchs.filter(r) else None)
    split = autosplit.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 .*cannot be multiplied") as caught:
        split(torch.randn(3, 5))
    assert caught.value.__cause__ is caught.value.__context__ is None
    with pytest.raises(
        FailingCallError,
        match=r"because linear fails: .*\[3, 5\] X \[4, 4\]\.?\n  Pass inputs of sizes",
    ):
        autosplit.split(nn.Linear(4, 4), torch.randn(3, 5))
    assert not logged
    split(torch.randn(3, 4)).sum().backward()
    assert len(split.functions) == split.pending == 1


class Strict(nn.Linear):
    """Its operator says of its result what is not so for an odd number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return strict(super().forward(x))


@torch.library.custom_op("autosplit_tests::strict", mutates_args=())
def strict(x: Tensor) -> Tensor:
    return x * 2


@strict.register_fake
def _(x: Tensor) -> Tensor:
    torch._check(x.shape[0] % 2 == 0, lambda: "an even number of rows")
    return torch.empty_like(x)


strict.register_autograd(lambda ctx, grad: grad * 2)


def test_a_call_that_only_fails_where_it_is_traced() -> None:
    """It runs as plain autograd, says so once, and adds to what is pending."""
    odd, even = torch.randn(3, 4), torch.randn(4, 4)

    def drive(call: Any, _: nn.Module) -> None:
        for x in (odd, even, odd):
            call(x).sum().backward()

    model = Strict(4, 2)
    with pytest.warns(UserWarning, match=r"(?s)runs calls like this one unsplit.*even number"):
        split = assert_alike(model, drive, pending=1)
    assert "2 call(s) of Strict ran unsplit, by plain autograd" in split.report()
    with pytest.raises(FailingCallError, match="even number"):
        autosplit.split(model, fullgraph=True, max_pending=math.inf)(odd)


@pytest.mark.parametrize("call", [(), (torch.ones(3, 4), torch.ones(3, 4))], ids=["few", "many"])
def test_a_call_that_does_not_fit(call: tuple[Tensor, ...]) -> None:
    split = autosplit.split(nn.Linear(4, 2))
    with pytest.raises(TypeError, match="positional argument"):
        split(*call)
    split(torch.randn(3, 4)).sum().backward()
    assert len(split.functions) == 1


@pytest.mark.skipif(
    TORCH < (2, 12), reason="Dynamo of torch 2.11 gives up what follows, which runs unsplit"
)
def test_a_call_that_the_forward_refuses() -> None:
    split = autosplit.split(Checking())
    with pytest.raises(ValueError, match="not a number"):
        split(torch.full((3, 4), torch.nan))
    split(torch.ones(3, 4)).sum().backward()
    split.backward_weight()
    assert "Deferred: the gradients of 2 of 2 parameters" in split.report()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.relu,), "split takes an nn.Module; got a builtin_function_or_method"),
        ((nn.Linear(4, 2), [torch.ones(3, 4)]), r"as a tuple \(or one tensor\).* got a list"),
        ((nn.Linear(4, 2), torch.ones(3, 4), torch.ones(3, 4)), "got a tuple and a Tensor"),
        ((autosplit.split(nn.Linear(4, 2)),), "split: the module is split already; pass its"),
        ((nn.Sequential(autosplit.split(nn.Linear(4, 2))),), "split: its submodule '0' is split"),
    ],
)
def test_no_module_and_no_inputs(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        autosplit.split(*given)


@pytest.mark.parametrize("inside", [False, True])
def test_ranks_would_not_average_under_a_split_module(inside: bool) -> None:
    """The reducer's own state is nothing to this, and needs other processes."""
    wrapped = nn.Module.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(4, 2)
    with pytest.raises(SplitError, match=r"a split module cannot contain .*before prepare\(\)"):
        autosplit.split(nn.Sequential(wrapped) if inside else wrapped)


def test_examples_that_do_not_fit() -> None:
    with pytest.raises(
        SplitError, match=r"Bilinear\.forward, which takes \(.*missing a required argument"
    ):
        autosplit.split(nn.Bilinear(4, 4, 2), torch.ones(3, 4))


def test_one_tensor_as_example() -> None:
    assert len(autosplit.split(nn.Linear(4, 2), torch.ones(3, 4)).functions) == 1


def test_retain_graph() -> None:
    """Two backwards are two microbatches; a third, without anything retained, is refused."""
    x = torch.randn(3, 4)

    def drive(call: Any, model: nn.Module) -> Any:
        leaf = x.clone().requires_grad_()
        output = call(leaf)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
        if call is not model:
            with pytest.raises(SplitError, match="Pass retain_graph=True to the first"):
                output.sum().backward()
        return leaf.grad

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    assert_alike(model, drive, pending=2)


def test_sparse_embedding_gradients() -> None:
    """They are deferred as they are."""

    def compare(what: str, *both: Any) -> None:
        assert_same(what, *(pytree.tree_map_only(Tensor, Tensor.to_dense, item) for item in both))

    model, tokens = nn.Embedding(7, 4, sparse=True), torch.tensor([[1, 1, 5], [0, 5, 6]])
    assert_equals_autograd(model, [*tokens[:, None]], compare=compare)
    assert model.weight.grad.is_sparse


@pytest.mark.parametrize("limit", [0, "1", None])
def test_wrong_limit(limit: Any) -> None:
    with pytest.raises(SplitError, match=f"max_graphs must be at least 1, got {limit!r}"):
        autosplit.split(nn.Linear(2, 2), max_graphs=limit)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_a_split_module(reentrant: bool) -> None:
    def drive(call: Any, _: nn.Module) -> list[Any]:
        leaves = [torch.ones(3, 4, requires_grad=True) for _ in range(2)]
        for x in leaves:
            run = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=reentrant)
            run.square().sum().backward()
        return [x.grad for x in leaves]

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    assert_alike(model, drive, pending=2)


def test_torch_compile_leaves_it_alone() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    outer = copy.deepcopy(plain)
    outer[1] = autosplit.split(outer[1], max_pending=math.inf)
    compiled = torch.compile(outer, backend="eager")
    x = torch.randn(3, 4)
    for _ in range(2):
        compiled(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert outer[1].pending == 2
    outer[1].backward_weight()
    assert_same_gradients(outer, plain)


class Image(Tensor):
    """A tensor by another name, as torchvision's are."""


def test_input_of_a_subclass() -> None:
    """torch.compile fails for it in the middle of torch; plain autograd runs it."""
    split = autosplit.split(nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match=r"is a Image, a subclass of Tensor.*as_subclass"):
        assert type(split(x.as_subclass(Image))) is Image
    assert type(split(x)) is Tensor


def test_class_that_is_replaced() -> None:
    """It would have been that of the model, without a word, as fully_shard replaces it."""
    split = autosplit.split(nn.Linear(4, 2))
    with pytest.raises(SplitError, match=r"cannot become a Bilinear: .*fully_shard.* anew"):
        split.__class__ = type("Bilinear", (nn.Bilinear, nn.Linear), {})
    assert type(split.model) is nn.Linear
