"""One rank fails and every rank says why, soon, and with no process left behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from autosplit.errors import SplitError
from autosplit.pipeline.engine.first_error import (
    ActionError,
    Board,
    Fault,
    Guard,
    LostPeerError,
    RankError,
)
from autosplit.pipeline.schedule.action import Action
from tests.pipeline import failing_workers
from tests.ranks import Ranks

Texts = list[tuple[dict[str, tuple[str, str]], dict[str, Any]]]
TIMEOUT = 120.0  # of the trainers in failing_workers it is 60

# Scenario -> the rank that fails, or None where every rank sees the fault itself; the first line.
SAID: dict[str, tuple[int | None, str]] = {
    "forward": (1, "rank 1 failed in 1F2: ValueError: bad weather"),
    "memory": (1, "rank 1 failed in 1F1: RuntimeError: "),
    "dtype between stages": (
        0,
        "rank 0 failed in 0F2: PipelineError: output 0 of stage 0 in microbatch 2 is "
        "float64[2, 6], but float32[2, 6] was agreed on",
    ),
    "weight": (0, "rank 0 failed in 0W1: RuntimeError: no weight today"),
    "factory": (1, "rank 1 failed in building the model: OSError: no such checkpoint"),
    "optimizer": (0, "rank 0 failed in building the model: ValueError: negative learning rate"),
    "code around": (1, "disk full"),
    "shape between stages": (
        0,
        "rank 0 failed in 0F2: PipelineError: output 0 of stage 0 in microbatch 2 is "
        "float32[2, 12], but float32[2, 6] was agreed on",
    ),
    "fewer outputs": (
        0,
        "rank 0 failed in 0F2: PipelineError: stage 0 put out 0 tensors for microbatch 2, but 1 ",
    ),
    "loss": (1, "loss_fn(output, target) must give one scalar that depends on the parameters"),
    "loss is a number": (1, "got no tensor: return it as it is, without .item() or float()"),
    "loss is an item": (1, "got no tensor: return it as it is, without .item() or float()"),
    "loss is nothing": (1, "got no tensor: return it as it is, without .item() or float()"),
    "wants a closure": (None, "LBFGS runs the model again in its step(closure), which a pipeline"),
    "loss without gradient": (1, "loss_fn(output, target) must give one scalar that depends"),
    "tied name": (1, "stage 1 has no parameter 'weight' to share; it has: tied"),
    "evaluation": (1, "rank 1 failed in 1F3: ValueError: bad weather"),
    "tied stage": (None, "shared parameter 'tied' is said to be on stage 2; the stages are 0 to 1"),
    "tied alone": (None, "a shared parameter needs two or more holders (stage, name); got [(0, "),
    "tied twice": (None, "parameter 'tied' of stage 0 is named twice in shared_parameters"),
    "tied shapes": (
        None,
        "shared parameters must have one shape and dtype and be all trained or all frozen; got "
        "'tied' of stage 0: [6, 6] torch.float32; 'tied' of stage 1: [8, 6] torch.float32",
    ),
    "tied with a hook": (1, "parameter 'tied' of stage 1 has a hook of register_hook, and other "),
    "late hook": (0, "parameter 0.weight has a hook of register_post_accumulate_grad_hook, which"),
    "loss with a parameter": (1, "loss_fn (Weighted) has a parameter 'scale', which no optimizer"),
    "unfrozen": (0, "parameter '0.bias' of stage 0 was unfrozen, added or replaced after the tr"),
    "replaced": (None, "was unfrozen, added or replaced after the trainer was built, and its opt"),
    "other norm": (None, "but max_grad_norm is None on rank 0 and 1.0 on rank 1"),
    "other count": (None, "but microbatches is 2 on rank 0 and 4 on rank 1"),
    "other schedule": (None, "but schedule is '1f1b' (split_backward=True, order "),
    "other accumulation": (None, "but accumulation is 'fused' on rank 0 and 'exact' on rank 1"),
    "other backend": (None, "but backend is 'eager' on rank 0 and 'inductor' on rank 1"),
    "other gradients": (None, "but grad_dtype is None on rank 0 and torch.float64 on rank 1"),
    "other factory": (None, "but stage_factory is 'given' on rank 0 and None on rank 1"),
    "other tied": (
        None,
        "but shared_parameters is [] on rank 0 and [[(0, '0.bias'), (1, ",
    ),
    "no timeline": (None, "there is no recorded step: set record=True before a step, then ask"),
    "foreign parameters": (
        None,
        "optimizer_fn built an optimizer of 4 parameters, 2 of which it was not given",
    ),
    "no optimizer": (None, "optimizer_fn must return a torch.optim.Optimizer; got a NoneType"),
    "no module": (None, "must be an nn.Module; got a int"),
    "world size": (None, "2 processes cannot hold 1 stages: each needs at least one stage"),
    "ranks": (None, "ranks=3 but the process group has 2 processes"),
}


@pytest.fixture(scope="module")
def texts(on_ranks: Ranks) -> Texts:
    started = time.monotonic()
    found = on_ranks(failing_workers.all_that_fails, 2, timeout=TIMEOUT)
    # One rank waiting out its timeout in one scenario would take 60 s.
    assert time.monotonic() - started < 60
    on_ranks.end()  # nobody else has ranks in which so much has failed
    return found


def test_every_scenario_is_here(texts: Texts) -> None:
    assert [set(found) for found, _ in texts] == [{*SAID, "slow", "leaves early"}] * 2


@pytest.mark.parametrize("scenario", SAID)
def test_every_rank_says_the_first_cause(texts: Texts, scenario: str) -> None:
    failed, text = SAID[scenario]
    for rank, (found, _) in enumerate(texts):
        kind, message = found[scenario]
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
    for found, _ in texts:
        assert "can't allocate memory: you tried to allocate 1073741824 bytes" in found["memory"][1]


def test_no_optimizer_moves_and_the_trainer_has_ended(texts: Texts) -> None:
    for _, after in texts:
        assert after["same"]
        assert after["last"] == (
            "1 this trainer has ended and cannot go on; build a new one. It ended because "
            "rank 1 failed in 1F2: ValueError: bad weather"
        )
        assert after["next"] == (4,)


def test_batches_of_other_values_are_told_once(texts: Texts) -> None:
    said = [after["other values"] for _, after in texts]
    assert said[0] == said[1]
    assert [name for name, warned in said[0].items() if not warned] == ["same", "left out"]
    start = "UserWarning: the ranks were given different batches: the"
    for name, parts in {
        "all": "inputs and the targets",
        "inputs": "inputs",
        "last sample": "targets",
    }.items():
        (text,) = said[0][name]
        assert text.startswith(f"{start} {parts} have some values on rank 0 and others on rank 1.")


def test_slow_rank_learns_that_it_was_given_up(texts: Texts) -> None:
    said = [found["slow"] for found, _ in texts]
    assert [each[1].splitlines()[0] for each in said] == [said[0][1].splitlines()[0]] * 2
    first, seen = said[0][1].splitlines()
    assert first.startswith("rank 1 has been in 1F1 for ")
    assert "s: it is stuck, or needs a longer timeout=; rank 0 waited 2" in first
    assert first.endswith("s for rank 1, which makes 1I1")
    assert seen.endswith("s for rank 1, which makes 1I1: is it stuck, or waiting itself?")


def test_whoever_needs_a_rank_that_has_left_learns_that(texts: Texts) -> None:
    (kind, text), (other, _) = (found["leaves early"] for found, _ in texts)
    assert (kind, other) == ("RankError", "nothing")
    assert text.startswith("rank 1 closed its trainer while rank 0 went on\nRank 0 ")


# --- the parts, in one process ------------------------------------------------------------


def _board() -> Board:
    return Board(dist.HashStore())  # type: ignore[attr-defined]  # documented, not in __all__


def test_only_the_first_fault_stays() -> None:
    board = _board()
    assert board.first() is None
    first, second = Fault(1, "1F0", "ValueError: a", "trace"), Fault(0, "0F1", "KeyError: b")
    assert board.post(first) == first
    assert board.post(second) == first
    assert board.first() == first
    assert first.report == "rank 1 failed in 1F0: ValueError: a\ntrace"


class _DeadStore:
    """What a store does once the process that served it is gone."""

    def check(self, keys: list[str], /) -> bool:
        raise RuntimeError("connection refused")

    def get(self, key: str, /) -> bytes:
        raise RuntimeError("connection refused")

    def set(self, key: str, value: str, /) -> None:
        raise RuntimeError("connection refused")

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        raise RuntimeError("connection refused")


def test_a_dead_store_does_not_hide_the_fault() -> None:
    board = Board(_DeadStore())
    fault = Fault(0, "0F1", "KeyError: b")
    assert board.first() is None
    assert board.post(fault) == fault


def _guard(rank: int, board: Board | None, closed: list[int]) -> Guard:
    return Guard(rank, board, lambda: closed.append(rank))


def test_guard_posts_before_it_closes() -> None:
    board = _board()
    standing: list[Fault | None] = []
    guard = Guard(2, board, lambda: standing.append(board.first()))
    with pytest.raises(RankError) as caught, guard("the optimizer step"):
        raise KeyError("lr")
    assert str(caught.value) == "rank 2 failed in the optimizer step: KeyError: 'lr'"
    assert isinstance(caught.value.__cause__, KeyError)
    assert standing == [caught.value.fault]


def test_guard_names_the_action_and_its_own_error() -> None:
    cause = ZeroDivisionError("one by none")
    text = r"^rank 0 failed in 1W2: ZeroDivisionError: one by none$"
    with pytest.raises(RankError, match=text) as caught, _guard(0, None, [])("the step"):
        raise ActionError(Action.parse("1W2")) from cause
    assert caught.value.__cause__ is cause


def test_guard_lets_errors_pass_that_say_all() -> None:
    closed: list[int] = []
    board = _board()
    with pytest.raises(SplitError, match=r"^cannot split$"), _guard(1, board, closed)("building"):
        raise SplitError("cannot split")
    with pytest.raises(KeyboardInterrupt), _guard(2, _board(), closed)("a step"):
        raise KeyboardInterrupt
    assert closed == [1, 2]
    first = board.first()
    assert first is not None
    assert first.headline == "rank 1 failed in building: SplitError: cannot split"


def test_lost_peer_gives_way_to_the_cause_on_the_board() -> None:
    board = _board()
    cause = board.post(Fault(1, "1F0", "ValueError: a", "the trace"))
    closed: list[int] = []
    with pytest.raises(RankError) as caught, _guard(0, board, closed)("a step"):
        raise LostPeerError("lost rank 1: Connection closed by peer")
    assert str(caught.value) == "rank 1 failed in 1F0: ValueError: a\nthe trace"
    assert caught.value.fault == cause
    assert caught.value.__suppress_context__
    assert closed == [0]


def test_lost_peer_without_a_cause_becomes_one_for_all() -> None:
    board = _board()
    for rank, text in ((0, "lost rank 1"), (2, "lost rank 1 as well")):
        with pytest.raises(RankError, match=r"^rank 0 lost rank 1$"), _guard(rank, board, [])("a"):
            raise LostPeerError(text)


def test_guard_waits_with_an_eye_on_the_board() -> None:
    board = _board()
    guard = _guard(0, board, [])
    asked = iter([False, False, True])
    guard.wait(lambda: next(asked), timeout=60.0)
    with pytest.raises(LostPeerError, match=r"^waited 0\.01 s for its device"):
        guard.wait(lambda: False, timeout=0.01)
    board.post(Fault(1, "1F0", "ValueError: a"))
    with pytest.raises(LostPeerError, match="another rank failed"):
        guard.wait(lambda: False, timeout=60.0)
