"""``ActionAudit``: actions that run again on a stage, and faults that change one bit."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosplit.pipeline.schedule.schedule import METHODS, Action, ActionKind
from autosplit.recorder.audit import ActionAudit
from autosplit.runtime.functions import SplitFunctions
from autosplit.stage import Stage

CPU = torch.device("cpu")
SPLIT, FUSED = ("0F0", "0F1", "0I0", "0W0", "0I1", "0W1"), ("0F0", "0F1", "0B0", "0B1")
AUDITED = [*((text, SPLIT) for text in SPLIT), *((text, FUSED) for text in FUSED)]
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "FIWB"),
    ({"grad_dtype": torch.float64}, "WB"),
    ({"memory": "lean"}, "IW"),
]
"""Options of a stage, and the kinds of actions that they change."""
Hook = Callable[[Stage, Any], None]


class Block(nn.Module):
    """A residual block with dropout, and a norm whose weight gradients I computes for W."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.drop = nn.LayerNorm(4), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def stage(**options: Any) -> Stage:
    built = Stage(Block(), (torch.zeros(3, 4, requires_grad=True),), **options)
    built.seed = torch.manual_seed
    return built


def inputs(action: Action) -> list[Any]:
    generator = torch.Generator().manual_seed(10 * action.microbatch + (action.kind.value == "F"))
    return [torch.randn(3, 4, generator=generator)]


def run(
    engine: Stage, row: tuple[str, ...], audited: str = "", hook: Hook = lambda *_: None
) -> tuple[list[Any], ActionAudit | None]:
    """Run a row, one action with an audit; the results, and the audit before its second run.

    ``hook`` is called in the audited action with its stage and its results.
    """
    results: list[Any] = []
    audit = ActionAudit(Action.parse(audited), engine, 7, CPU) if audited else None
    wraps = list(audit.wraps()) if audit else []
    for text in row:
        action = Action.parse(text)
        method = METHODS[action.kind]
        inputs_taken = [] if action.kind is ActionKind.BACKWARD_WEIGHT else [inputs(action)]

        def compute(*arguments: Any, method: str = method, action: Action = action) -> Any:
            return getattr(engine, method)(action.microbatch, *arguments)

        call: Any = compute
        for wrapped, wrap in wraps:
            if wrapped == action:
                call = lambda *a, wrap=wrap, inner=call: wrap(inner, *a)  # noqa: E731
        results.append(call(*inputs_taken))
        if text == audited:
            hook(engine, results[-1])
    results.append(dict(engine.gradients))
    return results, audit


def flat(results: list[Any]) -> list[Tensor]:
    rows = [list(r.values()) if isinstance(r, dict) else r or [] for r in results]
    return [tensor for row in rows for tensor in row if tensor is not None]


@functools.cache
def unaudited(row: tuple[str, ...], **options: Any) -> list[Any]:
    """The results of a row without an audit."""
    results, _ = run(stage(**options), row)
    return results


@pytest.mark.parametrize(
    ("audited", "row", "options"),
    [
        (audited, row, options)
        for options, kinds in OPTIONS
        for audited, row in AUDITED
        if audited[1] in kinds
    ],
)
def test_an_audit_changes_no_bit_and_finds_nothing(
    audited: str, row: tuple[str, ...], options: dict[str, Any]
) -> None:
    expected = unaudited(row, **options)
    engine = stage(**options)
    results, audit = run(engine, row, audited)
    state = torch.get_rng_state()
    assert audit is not None
    assert audit.run_again() == ""
    assert len(flat(results)) == len(flat(expected))
    assert all(map(torch.equal, flat(results), flat(expected)))
    assert not [*engine.saved_tensors, *engine.deferred_tensors]
    if audited[1] != "F":
        assert torch.equal(state, torch.get_rng_state())


def flip(tensor: Tensor) -> None:
    """Change the lowest bit of a number, unseen by autograd."""
    tensor.data.view(-1)[1:2].view(torch.int32).bitwise_xor_(1)


def damage(
    monkeypatch: pytest.MonkeyPatch, kind: str, calls: set[int], tensor: Callable[[Any], Tensor]
) -> None:
    """Flip a bit in what some calls of a graph return, counted from 1."""
    name = "run" if kind == "F" else METHODS[ActionKind(kind)]
    count, original = [0], getattr(SplitFunctions, name)

    def call(*args: Any) -> Any:
        results = original(*args)
        count[0] += 1
        if count[0] in calls:
            flip(tensor(results))
        return results

    monkeypatch.setattr(SplitFunctions, name, call)


@pytest.mark.parametrize(
    ("audited", "row", "tensor", "name"),
    [
        ("0F0", SPLIT, lambda results: results.outputs[0], "result 0"),
        ("0I0", SPLIT, lambda results: results[0][0], "result 0"),
        ("0W0", SPLIT, lambda results: max(results, key=torch.numel), "gradient of "),
        ("0B0", FUSED, lambda results: results[1][1], "gradient of "),
    ],
)
def test_a_wrong_bit_is_named(
    monkeypatch: pytest.MonkeyPatch, audited: str, row: Any, tensor: Any, name: str
) -> None:
    verdicts = ["the first of three runs was wrong", "the second of three runs was wrong"]
    for wrong, verdict in ((1, verdicts[0]), (2, verdicts[1])):
        with monkeypatch.context() as patch:
            # The first action of the row that runs this graph is the audited one.
            later = sum(text[1] == audited[1] for text in row) - 1
            damage(patch, audited[1], {wrong if wrong == 1 else wrong + later}, tensor)
            _, audit = run(stage(), row, audited)
            assert audit is not None
            text = rf"rank 7: {audited} had other bits when it ran again, in {name}.*; {verdict}"
            assert re.fullmatch(text, audit.run_again())


def test_memory_that_changes_after_an_action_accuses_no_run() -> None:
    _, audit = run(stage(), SPLIT, "0F0")
    assert audit is not None
    flip(audit._arguments[0][0])
    text = ".* in taken argument 0, .*; a tensor that it took has changed in memory since"
    assert re.fullmatch(text, audit.run_again())


def test_three_results_accuse_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def differing(results: Any) -> Tensor:
        seen.append(results)
        result: Tensor = results.outputs[0]
        result.add_(len(seen))
        return result

    damage(monkeypatch, "F", {1, 3, 4}, differing)
    _, audit = run(stage(), SPLIT, "0F0")
    assert audit is not None
    assert audit.run_again().endswith("; all three runs differ")


@pytest.mark.parametrize("audited", ["0F0", "0I0"])
def test_a_bit_that_flips_while_the_stage_holds_a_tensor_is_named(audited: str) -> None:
    """Whether the next action has run before the second run, or not yet."""

    def damage_held(engine: Stage, _: Any) -> None:
        tensors = engine.saved_tensors if audited == "0F0" else engine.deferred_tensors
        parameters = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
        free = [
            t
            for t in tensors
            if t.untyped_storage().data_ptr() not in parameters and t.numel() == 24
        ]
        flip(free[-1])

    for row in (SPLIT, SPLIT[: SPLIT.index(audited) + 1]):
        _, audit = run(stage(), row, audited, damage_held)
        assert audit is not None
        text = f"rank 7: {audited} had other bits when it ran again, in held "
        assert audit.run_again().startswith(text)


def test_what_was_kept_is_dropped_after_the_second_run() -> None:
    engine = stage()
    (x,) = inputs(Action.parse("0F0"))
    audit = ActionAudit(Action.parse("0F0"), engine, 0, CPU)
    (_, forward), (_, take), _ = audit.wraps()
    alive = weakref.ref(x)
    outputs = forward(lambda x: engine.forward(0, x), [x])
    take(lambda grads: engine.backward_input(0, grads), [torch.ones_like(outputs[0])])
    engine.backward_weight(0)
    del x
    assert alive() is not None
    audit.run_again()
    assert alive() is None
