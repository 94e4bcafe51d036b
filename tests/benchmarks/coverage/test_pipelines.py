"""``benchmarks.coverage transformers --pipeline`` judges the results of ranks."""

from __future__ import annotations

import pytest
import torch

from benchmarks.coverage.examine import Verdict
from benchmarks.coverage.observe import Observed

pytest.importorskip("transformers")

from benchmarks.coverage.pipelines import measure
from benchmarks.coverage.pipelines.lesson import Lesson
from benchmarks.coverage.pipelines.measure import compared
from benchmarks.coverage.pipelines.on_rank import Trained
from benchmarks.coverage.pipelines.reference import taught

DRAWS = 4  # of gpt2's first stage: three dropouts of a layer, and that of the embedding


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return Lesson("gpt2")


@pytest.fixture(scope="module")
def seen(lesson: Lesson) -> Observed:
    """The values that a training in one process sees."""
    return taught(lesson, DRAWS)


@pytest.fixture(autouse=True)
def reference(seen: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge compares with ``seen``. Another training could differ in last bits, because torch's
    sums depend on how memory is aligned.
    """

    def trained(lesson: Lesson, draws: int, dtype: torch.dtype = torch.float32) -> Observed:
        return {**seen} if dtype == torch.float32 else taught(lesson, draws, dtype)

    monkeypatch.setattr(measure, "taught", trained)


@pytest.fixture
def ranks(seen: Observed) -> list[Trained]:
    """Two ranks that have trained as one process does; both have the tied embedding."""
    halves: list[Observed] = [{}, {}]
    for name, value in seen.items():
        first = "transformer.w" in name or "transformer.h.0" in name
        second = not first or "transformer.wte" in name
        for half, local in zip(halves, (first, second), strict=True):
            half.update({name: value} if local else {})
    return [Trained(draws=DRAWS, seen=half) for half in halves]


def test_equal_is_equal(lesson: Lesson, ranks: list[Trained]) -> None:
    assert compared(lesson, ranks) == (Verdict.EQUAL.value, "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_that_differs_is_found(
    lesson: Lesson, seen: Observed, ranks: list[Trained], rank: int
) -> None:
    """Of the tied one, on either rank: also where one rank alone is right."""
    name = "transformer.wte.weight behind step 2"
    ranks[rank].seen[name] = ranks[rank].seen[name] * 1.001
    verdict, detail = compared(lesson, ranks)
    assert verdict == Verdict.WRONG.value
    assert detail.startswith(f"1 of {len(seen)} differ; {name}: ")


def test_a_gradient_that_no_rank_has_is_found(lesson: Lesson, ranks: list[Trained]) -> None:
    del ranks[1].seen["gradient of transformer.ln_f.weight [0]"]
    verdict, detail = compared(lesson, ranks)
    assert verdict == Verdict.WRONG.value
    assert "gradient of transformer.ln_f.weight [0]: None, expected torch.float32 [32]" in detail
