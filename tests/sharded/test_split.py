"""A split module that fully_shard has sharded, on two Gloo ranks, beside plain FSDP2."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp

import autosplit
from tests.kept_ranks import ranks
from tests.zoo import Made

from .models import (
    WORDS,
    Model,
    Shard,
    blocks_only,
    half_frozen,
    half_inside,
    last_together,
    sharded,
)


@contextlib.contextmanager
def reductions() -> Iterator[list[int]]:
    """The elements of every reduce-scatter of FSDP's."""
    kind = _fsdp_collectives.DefaultReduceScatter
    real, seen = kind.__call__, []

    def counted(self: Any, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(output_tensor.numel())
        return real(self, output_tensor, *args, **kwargs)

    kind.__call__ = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        kind.__call__ = real  # type: ignore[method-assign]


@contextlib.contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """The bytes of gathered parameters, each time that some are gathered or freed."""
    real, kept, seen = (fsdp.alloc_storage, fsdp.free_storage), dict[int, int](), list[int]()

    def counted(change: Callable[[Tensor], None], tensor: Tensor) -> None:
        change(tensor)
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        seen.append(sum(kept.values()))

    fsdp.alloc_storage, fsdp.free_storage = (partial(counted, item) for item in real)
    try:
        yield seen
    finally:
        fsdp.alloc_storage, fsdp.free_storage = real


def loss_of(module: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(words).float().flatten(0, 1), words.flatten())


class Pair:
    """One model twice: by plain FSDP2, and split.

    Args:
        shard: shards it.
        tied: whether embedding and head are one.
        model: another one than ``Model``.
        options: of ``split``.
    """

    def __init__(
        self, shard: Shard, *, tied: bool = False, model: nn.Module | None = None, **options: Any
    ) -> None:
        model = model or Model(tied=tied)
        self.plain, self.mine = shard(copy.deepcopy(model)), shard(copy.deepcopy(model))
        self.split = autosplit.split(self.mine, **options)
        both = self.plain, self.split
        # torch has no operators on lists of DTensors and others.
        self._alike = len({type(p) for p in self.mine.parameters()}) == 1
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=0.1, foreach=self._alike) for m in both
        ]
        self._words = torch.Generator(torch.get_default_device()).manual_seed(dist.get_rank())

    def words(self, count: int = 2) -> list[Tensor]:
        """Microbatches, other ones on each rank."""
        return [torch.randint(WORDS, (4, 5), generator=self._words) for _ in range(count)]

    def plain_step(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """FSDP2, with one reduction of all microbatches."""
        losses = []
        for at, words in enumerate(batches):
            set_sync(self.plain, at + 1 == len(batches))
            losses.append(loss_of(self.plain, words))
            losses[-1].backward()
        return losses

    def split_step(self, batches: Sequence[Tensor]) -> list[Tensor]:
        losses = []
        for words in batches:
            losses.append(loss_of(self.split, words))
            losses[-1].backward()
        return losses

    def differences(self) -> list[str]:
        """Parameters and gradients of which this rank's shards differ."""
        results = []
        pairs = zip(self.plain.named_parameters(), self.split.named_parameters(), strict=True)
        for (name, a), (other, b) in pairs:
            results += [] if name == other else [f"{name} is {other}"]
            results += [] if torch.equal(shard_of(a), shard_of(b)) else [f"{name} differs"]
            if a.grad is None or b.grad is None:
                results += [] if a.grad is b.grad else [f"gradient of {name}: {a.grad}, {b.grad}"]
            elif type(a.grad) is not type(b.grad) or not torch.equal(
                shard_of(a.grad), shard_of(b.grad)
            ):
                worst = (shard_of(a.grad) - shard_of(b.grad)).abs().max()
                results.append(f"gradient of {name} differs by {worst} ({type(b.grad).__name__})")
        return results

    def step(self) -> list[str]:
        """Clip, step and begin anew: what differs on the way."""
        norms = self._alike and [
            nn.utils.clip_grad_norm_(m.parameters(), 0.5, error_if_nonfinite=False)
            for m in (self.plain, self.split)
        ]
        same = not norms or torch.equal(local(norms[0]), local(norms[1]))
        results = [] if same else [f"norms {norms}"]
        results += self.differences()
        for optimizer in self.optimizers:
            optimizer.step()
        results += self.differences()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return results

    def train(self, steps: int = 2) -> list[str]:
        """Some steps of both; what differs, and reductions that are too many."""
        results = []
        for _ in range(steps):
            batches = self.words()
            with reductions() as theirs:
                plain = self.plain_step(batches)
            with reductions() as early:
                mine = self.split_step(batches)
            with reductions() as ours:
                self.split.backward_weight()
            if not all(map(torch.equal, plain, mine)):
                results.append(f"losses {plain} {mine}")
            if early or sorted(ours) != sorted(theirs):
                results.append(f"reduced {early} in backward, then {ours}; FSDP2 {theirs}")
            results += self.step()
        return results


def shard_of(tensor: Tensor) -> Tensor:
    output: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return output


def local(tensor: Tensor) -> Tensor:
    output: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return output


def set_sync(model: nn.Module, on: bool) -> None:
    for part in model.modules():
        if hasattr(part, "set_requires_gradient_sync"):
            part.set_requires_gradient_sync(on, recurse=False)


def raised(run: Callable[[], Any]) -> str:
    try:
        run()
    except autosplit.AutosplitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@functools.cache
def captured() -> Pair:
    """A pair for tests that leave it as they found it, but for what both models have learnt."""
    return Pair(sharded)


def usual() -> Pair:
    pair = captured()
    pair.plain.zero_grad(), pair.split.zero_grad()
    return pair


SHARDINGS: dict[str, Shard] = {
    "blocks only": blocks_only,
    "a group of two modules": last_together,
    "half frozen": half_frozen,
    "half precision inside": half_inside,
}


@pytest.mark.parametrize("name", SHARDINGS)
@ranks(2)
def test_it_trains_as_fsdp_does(name: str) -> list[str]:
    return Pair(SHARDINGS[name]).train()


@ranks(2)
def test_tied_lean_and_kept_after_the_forward() -> list[str]:
    shard = partial(sharded, reshard_after_forward=False)
    return Pair(shard, tied=True, memory="lean").train()


@ranks(2)
def test_blocks_are_gathered_one_by_one() -> list[str]:
    pair = Pair(partial(sharded, reshard_after_forward=True), model=Model(blocks=3))
    result = pair.train(1)  # memory is first taken where parameters are made
    with gathered_bytes() as theirs:
        pair.plain_step(pair.words())
    with gathered_bytes() as ours:
        pair.split_step(pair.words())
        pair.split.backward_weight()
    return result if max(ours) <= max(theirs) else [f"gathered {max(ours)}, FSDP2 {max(theirs)}"]


@ranks(2)
def test_gradients_are_computed_where_they_are_used() -> list[str]:
    results = []
    pair = usual()
    for _ in range(2):
        batches = pair.words()
        pair.plain_step(batches)
        pair.split_step(batches)
        results += pair.step()  # clips first
    batches = pair.words()
    pair.plain_step(batches)
    pair.split_step(batches)
    for optimizer in pair.optimizers:
        optimizer.step()
    return results + pair.differences()


@ranks(2)
def test_the_users_own_order_of_w_and_of_reductions() -> list[str]:
    pair, result = Pair(sharded, max_pending=2), []
    for _ in range(2):
        batches = pair.words(3)
        pair.plain_step(batches)
        with reductions() as seen:
            for at, words in enumerate(batches):
                pair.mine.set_requires_gradient_sync(at == 2)
                loss_of(pair.split, words).backward()
                if at:
                    pair.split.backward_weight(1)
            between = len(seen)
            pair.split.backward_weight()
        result += [] if (between, len(seen)) == (0, 3) else [f"{between}, {len(seen)} reductions"]
        result += pair.step()
    return result


@ranks(2)
def test_forwards_without_a_backward() -> list[str]:
    pair, result = usual(), []
    words = pair.words()[0]
    with torch.no_grad():
        same = torch.equal(pair.plain(words), pair.split(words))
    result += [] if same else ["no_grad"]
    pair.plain.eval(), pair.split.eval()
    same = torch.equal(pair.plain(words), pair.split(words))
    result += [] if same else ["eval"]
    pair.plain.train(), pair.split.train()
    return result + pair.train(1)


@ranks(2)
def test_run_by_fsdp_before() -> list[str]:
    pair = Pair(fully_shard, model=Model(blocks=1))  # type: ignore[arg-type]
    with torch.no_grad():
        pair.mine(pair.words()[0])  # a root stays gathered
    return pair.train(1)


@ranks(2)
def test_requires_grad_set_while_gathered() -> list[str]:
    pair = Pair(fully_shard, model=Model(blocks=1))  # type: ignore[arg-type]
    first = [*pair.mine.parameters()], [*pair.plain.parameters()]
    result = pair.train(1)
    for needed, kept in ((False, False), (True, False), (False, True), (True, True)):
        with torch.no_grad():
            for module in (pair.plain, pair.split):
                module(pair.words()[0])  # a root stays gathered
        pair.plain.reshard()  # type: ignore[operator]  # or FSDP2 puts back what was before
        for parameters, module in zip(first, (pair.mine, pair.plain), strict=True):
            chosen = parameters if kept else [*module.parameters()]
            for parameter in chosen[:2]:
                parameter.requires_grad_(needed)
        result += pair.train(1)
    return result


def products() -> nn.Module:
    """Its W reads parameters, and views of them."""
    a, b = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))
    return Made(
        lambda m, x: m.first(x) @ (m.a.T @ m.b).relu() @ m.b.T * 1, a=a, b=b, first=nn.Linear(4, 4)
    )


@ranks(2)
def test_weights_of_weights() -> list[str]:
    shard = partial(fully_shard, reshard_after_forward=True)
    pair, result = Pair(shard, model=products()), []
    for _ in range(2):
        batches = [torch.randn(2, 4) for _ in range(2)]
        for at, x in enumerate(batches):
            set_sync(pair.plain, at == 1)
            pair.plain(x).square().sum().backward()
            pair.split(x).square().sum().backward()
        pair.split.backward_weight()
        result += pair.step()
    return result


@ranks(2)
def test_state_dicts() -> list[str]:
    pair = Pair(sharded)
    result = pair.train(1)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    saved = {"model": pair.split.state_dict(), "optimizer": pair.optimizers[1].state_dict()}
    dcp.save(saved, checkpoint_id=folder[0])
    dcp.load({"model": pair.plain.state_dict()}, checkpoint_id=folder[0])
    result += pair.differences()
    result += pair.train(1)
    dcp.load(saved, checkpoint_id=folder[0])
    pair.split.load_state_dict(saved["model"])
    dcp.load({"model": pair.plain.state_dict()}, checkpoint_id=folder[0])
    return result + pair.differences()


@ranks(2)
def test_a_hook_steps_in_the_backward() -> list[str]:
    pair, calls = Pair(sharded), [0, 0]
    for at, module in enumerate((pair.plain, pair.split)):
        for parameter in module.parameters():

            def hook(parameter: Tensor, at: int = at) -> None:
                calls[at] += 1
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(hook)
    for words in pair.words():
        loss_of(pair.plain, words).backward()
        loss_of(pair.split, words).backward()
    result = pair.differences()
    return result if calls[0] == calls[1] else [*result, f"{calls} calls"]


@ranks(2)
def test_gradients_that_were_set_to_none_are_gone() -> list[str]:
    pair = usual()
    loss_of(pair.split, pair.words()[0]).backward()
    loss_of(pair.split, pair.words()[0]).backward()
    pair.split.backward_weight(1)
    pair.split.zero_grad()
    return pair.train(1)


@ranks(2)
def test_inputs_gradients_only() -> list[str]:
    plain = fully_shard(nn.Linear(4, 3))
    split = autosplit.split(plain)
    x = torch.randn(2, 4, requires_grad=True)
    (mine,) = torch.autograd.grad(split(x).sum(), x)
    (theirs,) = torch.autograd.grad(plain(x).sum(), x)
    return [] if torch.equal(mine, theirs) and not split.pending else ["differs"]


@ranks(2)
def test_written_between_forward_and_backward() -> list[str]:
    pair = Pair(sharded)
    loss = loss_of(pair.split, pair.words()[0])
    with torch.no_grad():
        pair.split.blocks[0].up.weight.mul_(2)
    text = raised(loss.backward)
    return [] if "were written between the forward and its backward" in text else [text]


@ranks(2)
def test_sharded_later() -> list[str]:
    pair, model = Pair(blocks_only), Model()
    pair.split = autosplit.split(model)
    loss_of(pair.split, pair.words()[0]).backward()
    pair.split.zero_grad()
    blocks_only(model)
    for a, b in zip(pair.plain.parameters(), model.parameters(), strict=True):
        a.data.copy_(b.data)
    pair.optimizers[1] = torch.optim.AdamW(model.parameters(), lr=0.1)
    return pair.train(1)
