"""Memory that messages are received into: used again when nobody has it, and never before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.boundaries import Negotiation, TensorMeta
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.mailbox import Buffers
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.routes import routes_of
from autosplit.pipeline.schedule.schedule import Schedule
from tests.pipeline import rendezvous
from tests.pipeline.rendezvous import Port, Wire

CPU = torch.device("cpu")
META = TensorMeta(torch.Size([4, 2]), torch.float32, True)
STEPS = 3


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.view(-1)[3:5],
        lambda tensor: tensor.detach().t(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.numpy(),
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
        lambda tensor: (tensor * torch.ones((), requires_grad=True)).sum(),  # autograd saved it
    ],
    ids=["tensor", "view", "transposed", "storage", "numpy", "memory", "dlpack", "saved"],
)
def test_whatever_is_kept_of_it_keeps_it(keep: Callable[[Tensor], Any]) -> None:
    buffers = Buffers(CPU)
    kept = keep(buffers.take(META))
    buffers.take(META)
    assert buffers.made == 2
    del kept
    held = [buffers.take(META), buffers.take(META)]
    assert buffers.made == len(held) == 2


def test_memory_that_somebody_gave_back_is_not_used() -> None:
    buffers = Buffers(CPU)
    buffers.take(META).untyped_storage().resize_(0)
    assert buffers.take(META).untyped_storage().nbytes() == 32
    assert buffers.made == 2


def test_what_is_kept_beyond_a_step_is_left_to_who_keeps_it() -> None:
    buffers = Buffers(CPU)
    kept = [buffers.take(META) for _ in range(5)]
    buffers.take(META)
    buffers.settle()
    kept.clear()
    held = [buffers.take(META), buffers.take(META)]
    assert buffers.made == 6 + len(held) - 1


def test_memory_of_inference_mode_serves_outside_of_it() -> None:
    buffers = Buffers(CPU)
    with torch.inference_mode():
        buffers.take(META)
    assert not buffers.take(META).is_inference()
    assert buffers.made == 1


class Holding:
    """Holds its input until W, as a real stage does; of some microbatches for ever."""

    def __init__(self, index: int, last: bool, keeps: bool) -> None:
        self._index = index
        self._last = last
        self._keeps = keeps
        self._saved: dict[int, Tensor] = {}
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.found: list[float] = []

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        (given,) = inputs
        inputs.clear()
        self._saved[microbatch] = given.view(-1)
        if self._keeps and microbatch == 1:
            self.kept.append((given[1:], given[1:].clone()))
        output = given * (microbatch + 2) + self._index
        return [output.sum()] if self._last else [output]

    def backward_input(self, microbatch: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        (grad,) = grads
        assert grad is not None
        grads.clear()
        return [grad * (microbatch + 2) * torch.ones(META.shape)]

    def backward_weight(self, microbatch: int) -> None:
        self.found.append(float(self._saved.pop(microbatch).sum()))

    def backward(self, microbatch: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        results = self.backward_input(microbatch, grads)
        self.backward_weight(microbatch)
        return results


def _run(schedule: Schedule, *, keeps: bool = False) -> tuple[list[list[int]], dict[int, Holding]]:
    """Per rank, how many buffers there were made after each of some steps; and the stages."""
    count = schedule.microbatches
    stages = {i: Holding(i, i == schedule.stages - 1, keeps) for i in range(schedule.stages)}

    def rank(port: Port) -> list[int]:
        negotiation = Negotiation("train", Groups(1, CPU, 1.0), lambda: None)
        negotiation.known.update(dict.fromkeys(range(schedule.stages), (META,)))
        transport = Transport(routes_of(schedule, port.rank), port, negotiation, device=CPU)
        own = {i: stage for i, stage in stages.items() if schedule.placement[i] == port.rank}
        grad = torch.tensor(1.0)
        executor = Executor(own, schedule, port.rank, transport, loss_grad=grad)
        made = []
        for step in range(STEPS):
            inputs = [[torch.full(META.shape, float(step + m))] for m in range(count)]
            executor.run(inputs, [[] for _ in range(count)])
            made.append(transport.buffers.made)
        return made

    ranks = len(schedule.ranks)
    return rendezvous.on_every_rank(ranks, Wire(ranks), rank), stages


@pytest.mark.parametrize("name", ["1f1b", "v-min"])
def test_no_step_after_the_first_makes_a_buffer(name: str) -> None:
    chunks = 2 if name == "v-min" else 1
    made, _ = _run(build(name, 4 * chunks, 8, ranks=4))
    assert [each[0] for each in made] == [each[-1] for each in made]


def test_what_a_user_keeps_never_changes() -> None:
    made, stages = _run(build("1f1b", 3, 6), keeps=True)
    for stage in stages.values():
        assert len(stage.kept) == STEPS
        assert all(torch.equal(tensor, copy) for tensor, copy in stage.kept)
    # One more in every step, on the ranks that receive activations: the one that was kept.
    assert [each[2] - each[1] for each in made] == [0, 1, 1]
    _, plain = _run(build("1f1b", 3, 6))
    assert {i: stage.found for i, stage in stages.items()} == {
        i: stage.found for i, stage in plain.items()
    }
