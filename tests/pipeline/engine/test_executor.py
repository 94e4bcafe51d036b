"""One rank's loop over its actions, on all stages in one process."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.pipeline.builders.build import build
from autosplit.pipeline.engine.boundaries import Negotiation, TensorMeta
from autosplit.pipeline.engine.executor import Executor
from autosplit.pipeline.engine.first_error import ActionError, LostPeerError
from autosplit.pipeline.engine.groups import Groups
from autosplit.pipeline.engine.timing import Recorder
from autosplit.pipeline.engine.transport import Transport
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.pipeline.schedule.routes import routes_of
from autosplit.pipeline.schedule.schedule import Schedule

CPU = torch.device("cpu")
META = TensorMeta(torch.Size([2]), torch.float32, True)


class Adding:
    """Adds 1 to its input and puts 10 times the gradient back; notes every call."""

    def __init__(self, index: int, log: list[str], last: bool) -> None:
        self._index = index
        self._log = log
        self._last = last

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        self._log.append(f"{self._index}F{microbatch} {[x.tolist() for x in inputs]}")
        output = inputs[0] + 1
        inputs.clear()
        return [output.sum()] if self._last else [output]

    def backward_input(self, microbatch: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        return self._back("I", microbatch, grads)

    def backward_weight(self, microbatch: int) -> None:
        self._log.append(f"{self._index}W{microbatch}")

    def backward(self, microbatch: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        return self._back("B", microbatch, grads)

    def _back(self, kind: str, microbatch: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        (grad,) = grads
        assert grad is not None
        self._log.append(f"{self._index}{kind}{microbatch} {grad.tolist()}")
        grads.clear()
        return [torch.full((2,), 10 * float(grad.sum())), None]


def _executor(
    schedule: Schedule, log: list[str], stages: dict[int, Any] | None = None, **options: Any
) -> Executor:
    groups = Groups(1, CPU, 1.0)
    negotiation = Negotiation("train", groups, lambda: None)
    for boundary in range(schedule.stages - 1):
        negotiation.publish(boundary, [META])
    if stages is None:
        last = schedule.stages - 1
        stages = {index: Adding(index, log, index == last) for index in range(schedule.stages)}
    transport = Transport(routes_of(schedule, 0), groups, negotiation, device=CPU)
    loss_grad = torch.tensor(0.5)
    return Executor(stages, schedule, 0, transport, loss_grad=loss_grad)


def _batch(count: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    return (
        [[torch.full((2,), float(microbatch))] for microbatch in range(count)],
        [[torch.tensor([9])] for _ in range(count)],
    )


def test_values_flow_through_the_stages_and_back() -> None:
    log: list[str] = []
    schedule = build("naive", 2, 1, ranks=1)
    losses = _executor(schedule, log).run(*_batch(1))
    assert {m: float(loss) for m, loss in losses.items()} == {0: 4.0}
    assert log == [
        "0F0 [[0.0, 0.0]]",
        "1F0 [[1.0, 1.0], [9]]",
        "1I0 0.5",
        "0I0 [5.0, 5.0]",
        *(["0W0", "1W0"] if log[4] == "0W0" else ["1W0", "0W0"]),
    ]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("split", [True, False])
def test_actions_run_in_the_order_of_the_schedule(name: str, split: bool) -> None:
    log: list[str] = []
    schedule = build(name, 3, 4, split_backward=split, ranks=1)
    losses = _executor(schedule, log).run(*_batch(4))
    assert [line.split()[0] for line in log] == [str(action) for action in schedule.ranks[0]]
    assert {m: float(loss) for m, loss in losses.items()} == {0: 6.0, 1: 8.0, 2: 10.0, 3: 12.0}


def test_the_same_executor_runs_again() -> None:
    log: list[str] = []
    executor = _executor(build("1f1b", 2, 2, ranks=1), log)
    first = executor.run(*_batch(2))
    assert len(first) == 2
    assert executor.run(*_batch(2)) == first
    assert log[: len(log) // 2] == log[len(log) // 2 :]


def test_one_stage_gets_inputs_and_targets() -> None:
    log: list[str] = []
    _executor(build("gpipe", 1, 1, split_backward=False), log).run(*_batch(1))
    assert log == ["0F0 [[0.0, 0.0], [9]]", "0B0 0.5"]


def test_spans_hold_the_computation_of_every_action_in_order() -> None:
    recorder = Recorder(0)
    schedule = build("1f1b", 2, 2, ranks=1)
    executor = _executor(schedule, [])
    for _ in range(2):
        executor.run(*_batch(2), recorder)
    spans = recorder.spans()
    assert [span.action for span in spans] == list(schedule.ranks[0])
    times = [time for span in spans for time in (span.start, span.end)]
    assert times == sorted(times)
    assert {span.rank for span in spans} == {0}


class Holding(Adding):
    """Keeps weak references to what it puts out, and counts what lives when it runs forward."""

    def __init__(self) -> None:
        super().__init__(0, [], False)
        self.made: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        self.alive.append(sum(made() is not None for made in self.made))
        outputs = super().forward(microbatch, inputs)
        self.made.append(weakref.ref(outputs[0]))
        return outputs


def test_tensors_die_when_the_next_stage_has_used_them() -> None:
    first = Holding()
    stages = {0: first, 1: Adding(1, [], True)}
    _executor(build("1f1b", 2, 4, ranks=1), [], stages).run(*_batch(4))
    assert first.alive == [0, 0, 0, 0]
    assert all(made() is None for made in first.made)


def test_no_autograd_inside() -> None:
    modes = []

    class Asking(Adding):
        def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
            modes.append(torch.is_grad_enabled())
            return super().forward(microbatch, inputs)

    _executor(build("gpipe", 1, 2), [], {0: Asking(0, [], True)}).run(*_batch(2))
    assert modes == [False, False]
    assert torch.is_grad_enabled()


def test_an_error_names_its_action() -> None:
    class Failing(Adding):
        def backward_weight(self, microbatch: int) -> None:
            raise OSError("disk full")

    stages = {0: Adding(0, [], False), 1: Failing(1, [], True)}
    with pytest.raises(ActionError) as caught:
        _executor(build("1f1b", 2, 1, ranks=1), [], stages).run(*_batch(1))
    assert (caught.value.action.stage, caught.value.action.kind) == (1, ActionKind.BACKWARD_WEIGHT)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_lost_peer_is_passed_on_as_it_is() -> None:
    class Lonely(Adding):
        def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
            raise LostPeerError("lost rank 1")

    with pytest.raises(LostPeerError, match=r"^lost rank 1$"):
        _executor(build("gpipe", 1, 1), [], {0: Lonely(0, [], True)}).run(*_batch(1))


def test_stages_must_fit_the_schedule() -> None:
    class ForwardOnly:
        def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
            return inputs

    schedule = build("gpipe", 2, 1, ranks=1)
    with pytest.raises(
        PipelineError, match=r"1F0 is scheduled on rank 0, which holds stages \[0\]"
    ):
        _executor(schedule, [], {0: Adding(0, [], False)})
    with pytest.raises(PipelineError, match="stage 1 has no backward"):
        _executor(schedule, [], {0: Adding(0, [], False), 1: ForwardOnly()})
