"""The ablation of W: every way adds the same, and memory is that of the call alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autosplit
from benchmarks.split.ablation import SLICES, WAYS, deferred, measure_subject, render
from benchmarks.split.meter import extra
from benchmarks.split.models import SIZES, Subject, build


def allocate(kib: int) -> Tensor:
    return torch.empty(kib * 1024, dtype=torch.uint8)


def test_every_way_adds_the_same() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(SLICES)))
    subject = Subject("linears", model, torch.randn(3, 8), torch.randn(3, 8))
    functions = autosplit.Stage(model, [subject.x.clone().requires_grad_()]).functions
    found = {}
    with torch.no_grad():
        for name, way in WAYS.items():
            found[name] = [torch.ones_like(each) for each in model.parameters()]
            way(functions, deferred(functions, subject, 3), found[name])
    first, *others = found.values()
    for sums in others:
        for mine, theirs in zip(sums, first, strict=True):
            torch.testing.assert_close(mine, theirs)
    for name in ("accumulated", f"{SLICES} slices"):
        assert all(map(torch.equal, found[name], first))


def test_extra_memory_of_a_call() -> None:
    def call(held: list[Tensor]) -> None:
        held.clear()
        allocate(30)
        allocate(150)

    found = extra(lambda: [allocate(100)], call, torch.device("cpu"))
    assert found == (150 - 100) * 1024


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_rows_and_their_tables() -> None:
    rows = list(measure_subject(build("resnet", SIZES["tiny"]["resnet"]), 1, (1, 2)))
    assert [row["name"] for row in rows] == ["resnet, 1 microbatch", "resnet, 2 microbatches"]
    times, memory = render(rows).split("\n\n")
    assert times.count("\n") == memory.count("\n") == 1 + len(rows)
    for row in rows:
        assert row["ways"]["accumulated"]["extra"] <= row["ways"]["one by one"]["extra"]
