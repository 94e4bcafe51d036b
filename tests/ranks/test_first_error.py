"""One rank fails and every rank says why, soon, and with no process left behind."""

from __future__ import annotations

import copy
import functools
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.errors import PipelineError, SplitError
from autosplit.ranks.fault_store import Fault, FaultStore
from autosplit.ranks.first_error import Guard, LostPeerError, RankActivity, RankError
from tests.kept_ranks import Ranks
from tests.pipeline.reference_stage import ReferenceStage
from tests.pipeline.workers import ENDS, WIDTH, Tied, block, data, equal, outcomes, sgd, trainer
from tests.zoo import Made

Texts = list[tuple[dict[str, tuple[str, str]], dict[str, Any]]]
TIMEOUT = 120.0  # of the trainers below it is 60


class Trip(nn.Module):
    """A block whose forward does ``then`` at microbatch ``at``."""

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        super().__init__()
        self.block = block(1)
        # Shared by deep copies, and -1 because building the stage runs the module once.
        self._calls = itertools.count(-1)
        self._at = at
        self._then = then

    def __deepcopy__(self, memo: dict[int, Any]) -> Trip:
        return self

    def forward(self, x: Tensor) -> Tensor:
        if next(self._calls) == self._at:
            self._then()
        output: Tensor = self.block(x)
        return output


class Vanishing(nn.Module):
    """Puts out nothing after the second microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block(0)
        self._calls = itertools.count(-1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Vanishing:
        return self

    def forward(self, x: Tensor) -> Any:
        return self.block(x) if next(self._calls) < 2 else ()


class Widening(Vanishing):
    """Puts out float64 after the second microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x if next(self._calls) < 2 else x.double()


class WeightTrip(ReferenceStage):
    """Raises in the second weight gradient of stage 0."""

    def backward_weight(self, microbatch: int) -> None:
        if self.index == 0 and microbatch == 1:
            raise RuntimeError("no weight today")
        super().backward_weight(microbatch)


def _factory_fails(index: int) -> nn.Module:
    if index == 1:
        raise OSError("no such checkpoint")
    return block(index)


def _optimizer_fails(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if dist.get_rank() == 0:
        raise ValueError("negative learning rate")
    return sgd(parameters)


def _optimizer_of_others(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return sgd([*parameters, *block(7).parameters()])


def _code_around_fails() -> None:
    with trainer() as engine:
        engine.step(data(8))
        if engine.rank == 1:
            raise OSError("disk full")
        engine.step(data(8))


def _step(batch: Any = None, **options: Any) -> None:
    trainer(**options).step(data(8) if batch is None else batch)


def _evaluate() -> None:
    """The third microbatch of the second evaluation fails; none has run the module before."""
    engine = trainer(second(6, "raise"))
    for _ in range(2):
        engine.evaluate(data(8))


def weighted() -> nn.Module:
    """A loss with a parameter of its own."""
    return Made(
        lambda m, output, target: (m.scale * (output - target) ** 2).mean(),
        scale=nn.Parameter(torch.ones(())),
    )


def _unfrozen() -> None:
    with trainer([block(0).requires_grad_(False), block(1)]) as engine:
        engine.step(data(8))
        if 0 in engine.modules:
            engine.modules[0].get_parameter("0.bias").requires_grad_()
        engine.step(data(8))


def _replaced() -> None:
    with trainer() as engine:
        engine.step(data(8))
        for index, module in engine.modules.items():
            module.load_state_dict(block(index).state_dict(), assign=True)
        engine.step(data(8))


def _leaves_early() -> None:
    """Rank 1's batches end before those of rank 0."""
    with trainer() as engine:
        engine.step(data(8))
        if engine.rank == 0:
            engine.step(data(8))


def _different(**options: tuple[Any, Any]) -> None:
    _step(**{name: values[dist.get_rank()] for name, values in options.items()})


def _tied(names: list[tuple[int, str]], width: int = WIDTH) -> None:
    trainer(lambda index: Tied(index, WIDTH + index * (width - WIDTH)), shared_parameters=[names])


def _tied_with_hook() -> None:
    with trainer(Tied, shared_parameters=[[(0, "tied"), (1, "tied")]]) as engine:
        if 1 in engine.modules:
            engine.modules[1].get_parameter("tied").register_hook(lambda grad: 0 * grad)
        engine.step(data(8))


Scenario = tuple[Callable[[], Any], int | None, str]
OWN: dict[str, Any] = {"stage_factory": None}
ONE_SCALAR = "loss_fn(output, target) must return one real scalar that depends on the parameters"


def step(**options: Any) -> Callable[[], None]:
    return functools.partial(_step, **options)


def second(at: int, how: str) -> Callable[[int], nn.Module]:
    return lambda index: Trip(at, ENDS[how]) if index == 1 else block(index)


# The call; the rank that fails, or None if every rank sees the fault itself; the first line.
SCENARIOS: dict[str, Scenario] = {
    "forward": (step(model=second(2, "raise")), 1, "rank 1 failed in 1F2: ValueError: bad weather"),
    "memory": (step(model=second(1, "exhaust")), 1, "rank 1 failed in 1F1: RuntimeError: "),
    "dtype between stages": (
        step(model=lambda index: Widening() if index == 0 else block(1)),
        0,
        "rank 0 failed in 0F2: PipelineError: output 0 of stage 0 in microbatch 2 is "
        "float64[2, 6], but float32[2, 6] was agreed on",
    ),
    "fewer outputs": (
        step(model=lambda index: Vanishing() if index == 0 else block(1)),
        0,
        "rank 0 failed in 0F2: PipelineError: stage 0 returned 0 tensors for microbatch 2, but 1 ",
    ),
    "weight": (step(stage_factory=WeightTrip), 0, "rank 0 failed in 0W1: RuntimeError: no weight"),
    "factory": (
        step(model=_factory_fails),
        1,
        "rank 1 failed in building the model: OSError: no such checkpoint",
    ),
    "optimizer": (
        step(optimizer_fn=_optimizer_fails),
        0,
        "rank 0 failed in building the model: ValueError: negative learning rate",
    ),
    "code around": (lambda: _code_around_fails(), 1, "disk full"),
    "loss": (step(loss_fn=lambda output, target: output - target), 1, ONE_SCALAR),
    "loss without gradient": (step(loss_fn=lambda output, target: target.mean()), 1, ONE_SCALAR),
    "loss is an item": (
        step(loss_fn=lambda output, target: (output - target).mean().item(), **OWN),
        1,
        "got no tensor: return it as it is, without .item() or float()",
    ),
    "loss with a parameter": (
        step(loss_fn=weighted()),
        1,
        "loss_fn (Made) has a parameter 'scale', which no optimizer",
    ),
    "wants a closure": (
        step(optimizer_fn=torch.optim.LBFGS),
        None,
        "LBFGS runs the model again in its step(closure), which a pipeline",
    ),
    "foreign parameters": (
        step(optimizer_fn=_optimizer_of_others),
        None,
        "optimizer_fn built an optimizer of 4 parameters, 2 of which are not this rank",
    ),
    "no optimizer": (
        step(optimizer_fn=lambda parameters: None),
        None,
        "optimizer_fn must return a torch.optim.Optimizer; got a NoneType",
    ),
    "evaluation": (lambda: _evaluate(), 1, "rank 1 failed in 1F3: ValueError: bad weather"),
    "tied name": (
        lambda: _tied([(0, "tied"), (1, "weight")]),
        1,
        "stage 1 has no parameter 'weight' to share; it has: tied",
    ),
    "tied stage": (
        lambda: _tied([(0, "tied"), (2, "tied")]),
        None,
        "shared_parameters has 'tied' of stage 2, which does not exist; the stages are 0 to 1",
    ),
    "tied alone": (
        lambda: _tied([(0, "tied")]),
        None,
        "a group of shared_parameters needs two or more members (stage, name); ",
    ),
    "tied twice": (
        lambda: _tied([(0, "tied"), (1, "tied"), (0, "tied")]),
        None,
        "parameter 'tied' of stage 0 is named twice in shared_parameters",
    ),
    "tied shapes": (
        lambda: _tied([(0, "tied"), (1, "tied")], width=8),
        None,
        "all copies of a shared parameter must have one shape and dtype, and be all trained "
        "or all frozen; got 'tied' of stage 0: float32[6, 6], trained; "
        "'tied' of stage 1: float32[8, 6], trained",
    ),
    "tied with a hook": (
        lambda: _tied_with_hook(),
        1,
        "parameter 'tied' of stage 1 has a hook of register_hook, and is tied ",
    ),
    "unfrozen": (
        lambda: _unfrozen(),
        0,
        "parameter '0.bias' of stage 0 was unfrozen, added or replaced after the tr",
    ),
    "replaced": (
        lambda: _replaced(),
        None,
        "was unfrozen, added or replaced after the trainer was built, and is not",
    ),
    "other norm": (
        lambda: _different(max_grad_norm=(None, 1.0)),
        None,
        "but max_grad_norm is None on rank 0 and 1.0 on rank 1",
    ),
    "other schedule": (
        lambda: _different(schedule=("1f1b", "gpipe")),
        None,
        "but schedule is '1f1b' (split_backward=True, order ",
    ),
    "other factory": (
        lambda: _different(stage_factory=(ReferenceStage, None)),
        None,
        "but stage_factory is 'given' on rank 0 and None on rank 1",
    ),
    "other tied": (
        lambda: _different(shared_parameters=([], [[(0, "0.bias"), (1, "0.bias")]])),
        None,
        "but shared_parameters is [] on rank 0 and [[(0, '0.bias'), (1, ",
    ),
    "no timeline": (
        lambda: trainer().timeline(),
        None,
        "no step was recorded: set record=True before a step, then call timeline()",
    ),
    "no module": (step(model=lambda index: index), None, "must be an nn.Module; got a int"),
    "world size": (
        step(model=[block(0)]),
        None,
        "2 processes cannot hold 1 stages: each needs at least one stage",
    ),
    "ranks": (step(stages=3, ranks=3), None, "ranks=3 but the process group has 2 processes"),
    "slow": (step(model=second(1, "nap"), timeout=2.0), None, ""),
    "leaves early": (lambda: _leaves_early(), None, ""),
}
ALIKE = [name for name, (_, _, text) in SCENARIOS.items() if text]


def after_a_failure() -> dict[str, Any]:
    """A failed step leaves optimizers untouched; its trainer refuses the next step."""
    engine = trainer(second(2, "raise"))
    earlier = copy.deepcopy(engine.state_dict())
    for attempt in range(2):
        try:
            engine.step(data(8))
        except PipelineError as error:
            last = f"{attempt} {error}"
    same = equal(engine.state_dict(), earlier)
    engine.close()
    with trainer() as another:
        return {"same": same, "last": last, "next": another.step(data(8)).shape}


def other_values() -> dict[str, list[str]]:
    """Return the errors for batches whose values differ between ranks; training goes on."""
    inputs, targets = data(8)
    rank = dist.get_rank()
    batches = {
        "same": (inputs.clone(), targets.clone()),
        "all": data(8, seed=rank),
        "inputs": (inputs + rank, targets),
        "last sample": (inputs, torch.cat([targets[:-1], targets[-1:] + rank])),
        "left out": (inputs, None) if rank == 0 else (None, targets),
    }
    return {name: _warned(batch) for name, batch in batches.items()}


def _warned(batch: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, trainer() as engine:
        warnings.simplefilter("always")
        engine.evaluate(batch)
        engine.step(batch)
        engine.step(batch)
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def all_that_fails() -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    acts = {name: act for name, (act, _, _) in SCENARIOS.items()}
    return outcomes(acts), {**after_a_failure(), "other values": other_values()}


@pytest.fixture(scope="module")
def texts(on_ranks: Ranks) -> Texts:
    started = time.monotonic()
    result = on_ranks(all_that_fails, 2, timeout=TIMEOUT)
    # One rank waiting out its timeout in one scenario would take 60 s.
    assert time.monotonic() - started < 60
    on_ranks.end()  # nobody else has ranks in which so much has failed
    return result


def test_every_scenario_is_here(texts: Texts) -> None:
    assert [set(result) for result, _ in texts] == [{*SCENARIOS}] * 2


@pytest.mark.parametrize("scenario", ALIKE)
def test_every_rank_says_the_first_cause(texts: Texts, scenario: str) -> None:
    _, failed, text = SCENARIOS[scenario]
    for rank, (result, _) in enumerate(texts):
        kind, message = result[scenario]
        assert text in message
        if failed is None:
            assert kind == "PipelineError"
        elif rank != failed:
            # The others say it in one line, then with the traceback of the rank that failed.
            assert kind == "RankError"
            assert message.startswith(f"rank {failed} failed in ")
            assert "\nTraceback (most recent call last):\n" in message
            assert "Connection" not in message


def test_traceback_of_the_failed_rank_reaches_the_others(texts: Texts) -> None:
    lines = texts[0][0]["forward"][1].splitlines()
    assert lines[-1] == "ValueError: bad weather"
    assert 'raise ValueError("bad weather")' in lines[-2]


def test_out_of_memory_is_said_as_torch_says_it(texts: Texts) -> None:
    for result, _ in texts:
        assert (
            "can't allocate memory: you tried to allocate 1073741824 bytes" in result["memory"][1]
        )


def test_no_optimizer_moves_and_the_trainer_has_ended(texts: Texts) -> None:
    for _, after in texts:
        assert after["same"]
        assert after["last"] == (
            "1 this trainer has ended and cannot go on; build a new one. It ended because "
            "rank 1 failed in 1F2: ValueError: bad weather"
        )
        assert after["next"] == (4,)


def test_batches_of_other_values_are_told_once(texts: Texts) -> None:
    message = [after["other values"] for _, after in texts]
    assert message[0] == message[1]
    assert [name for name, warned in message[0].items() if not warned] == ["same", "left out"]
    start = "UserWarning: ranks have different batches:"
    for name, part in {"all": "inputs", "inputs": "inputs", "last sample": "targets"}.items():
        (text,) = message[0][name]
        assert text.startswith(f"{start} the values of {part} differ between rank 0 and rank 1.")


def test_slow_rank_learns_that_it_was_given_up(texts: Texts) -> None:
    message = [result["slow"] for result, _ in texts]
    assert [item[1].splitlines()[0] for item in message] == [message[0][1].splitlines()[0]] * 2
    first, seen = message[0][1].splitlines()
    assert first.startswith("rank 1 has been in 1F1 for ")
    assert "s: it is stuck, or needs a longer timeout=; rank 0 waited 2" in first
    assert first.endswith("s for rank 1, which makes 1I1")
    assert seen.endswith("s for rank 1, which makes 1I1: is it stuck, or waiting itself?")


def test_a_rank_that_left_is_named_to_ranks_that_need_it(texts: Texts) -> None:
    (kind, text), (other, _) = (result["leaves early"] for result, _ in texts)
    assert (kind, other) == ("RankError", "nothing")
    assert text.startswith("rank 1 closed its trainer while rank 0 went on: every rank must make ")


# --- the parts, in one process ------------------------------------------------------------


def _faults() -> FaultStore:
    return FaultStore(dist.HashStore())  # type: ignore[attr-defined]  # documented, not in __all__


class _DeadStore:
    """A store whose server process has ended."""

    def check(self, keys: list[str], /) -> bool:
        raise RuntimeError("connection refused")

    def get(self, key: str, /) -> bytes:
        raise RuntimeError("connection refused")

    def set(self, key: str, value: str, /) -> None:
        raise RuntimeError("connection refused")

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        raise RuntimeError("connection refused")


def test_a_dead_store_does_not_hide_the_fault() -> None:
    faults = FaultStore(_DeadStore())
    fault = Fault(0, "0F1", "KeyError: b")
    assert faults.first() is None
    assert faults.post(fault) == fault


def _guard(rank: int, faults: FaultStore | None, closed: list[int]) -> Guard:
    return Guard(rank, faults, lambda: closed.append(rank), RankActivity(), None)


def test_guard_lets_errors_pass_that_say_all() -> None:
    closed: list[int] = []
    faults = _faults()
    with (
        pytest.raises(SplitError, match=r"^cannot split\nMore: "),
        _guard(1, faults, closed).during("building"),
    ):
        raise SplitError("cannot split")
    with pytest.raises(KeyboardInterrupt), _guard(2, _faults(), closed).during("a step"):
        raise KeyboardInterrupt
    assert closed == [1, 2]
    first = faults.first()
    assert first is not None
    assert first.headline == "rank 1 failed in building: SplitError: cannot split"


def test_lost_peer_without_a_cause_becomes_one_for_all() -> None:
    faults = _faults()
    for rank, text in ((0, "lost rank 1"), (2, "lost rank 1 as well")):
        with (
            pytest.raises(RankError, match=r"^rank 0 lost rank 1\nMore: "),
            _guard(rank, faults, []).during("a"),
        ):
            raise LostPeerError(text)


def test_guard_checks_for_faults_while_it_waits() -> None:
    faults = _faults()
    guard = _guard(0, faults, [])
    requested = iter([False, False, True])
    guard.wait(lambda: next(requested), timeout=60.0)
    with pytest.raises(LostPeerError, match=r"^waited 0\.01 s for its device"):
        guard.wait(lambda: False, timeout=0.01)
    faults.post(Fault(1, "1F0", "ValueError: a"))
    with pytest.raises(LostPeerError, match="another rank failed"):
        guard.wait(lambda: False, timeout=60.0)
