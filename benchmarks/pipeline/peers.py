"""Ours beside torch.distributed.pipelining: the same model, ranks, batches, in one run."""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autosplit.compare.example import call_factory
from autosplit.ranks.launch import launch
from autosplit.text.figures import quartiles, spread

from ..peak import peak_bytes
from ..results import Rows, by_setting, mark, ratios, table
from .contenders import IN_FLIGHT, OURS, THEIRS, Contender
from .turns import Rounds, Turn, Turns, gather, take_turns

COUNTS = (2, 4, 8)
BACKENDS = ("eager", "inductor")
FACTORY = "examples.models:llama_workload"
OVERRIDES = {"seq": "128"}  # actions of 20 ms and more
TARGET = {2: 1.05, 4: 1.05, 8: 1.0}  # our best over their best

_HEADERS = ("by", "schedule", "step ms", "spread ms", "peak MiB", "over ours of the same schedule")


@dataclasses.dataclass(frozen=True)
class Row(Rounds):
    """What one contender took.

    Attributes:
        schedule: the contender's name.
        ours: by autosplit, or by torch.
        microbatches: M.
        rounds: seconds of its step in each round, those of the slowest rank.
        peak: the larger peak of a rank, in bytes.
        activations: the larger of what is left of a rank's peak without its gradients.
        error: why it did not run.
        match: of one by torch, the name of the same schedule by autosplit.
    """

    schedule: str
    ours: bool
    microbatches: int
    rounds: Sequence[float] = ()
    peak: int = 0
    activations: int = 0
    error: str = ""
    match: str = ""


def measure_all(
    rounds: int, backends: Sequence[str], counts: Sequence[int], ranks: int
) -> Iterator[dict[str, Any]]:
    """Each of the backends at each M; on more ranks than two, schedules of one stage a rank and of
    two, with two layers a rank, at M of two microbatches a rank.
    """
    where, overrides, turns = "", OVERRIDES, [*OURS, *THEIRS]
    if ranks > 2:
        where, counts = f"{ranks} ranks, ", (2 * ranks,)
        overrides = {**OVERRIDES, "layers": str(2 * ranks)}
        turns = [each for each in turns if each.chunks <= 2 and not each.in_flight]
    for backend in backends:
        chosen = [each for each in turns if each.compiled or backend == "eager"]
        for row in measure(FACTORY, counts, rounds, backend, overrides, chosen, ranks):
            whose = "ours" if row.ours else "torch"
            name = f"{backend}, {where}M={row.microbatches}: {whose} {row.schedule}"
            yield {"name": name, **dataclasses.asdict(row)}


def measure(
    factory: str,
    microbatches: Sequence[int],
    rounds: int,
    backend: str = "eager",
    overrides: Mapping[str, object] = OVERRIDES,
    contenders: Sequence[Contender] = (*OURS, *THEIRS),
    ranks: int = 2,
) -> list[Row]:
    """Every contender at every M, taking turns in an order of its own in each round; one launch.

    Args:
        factory: of the workload.
        microbatches: the Ms, one after another.
        rounds: turns of each contender.
        backend: how stages are run.
        overrides: settings of the workload.
        contenders: who takes part.
        ranks: how many processes, of one thread each.
    """
    args = (factory, overrides, tuple(contenders), tuple(microbatches), rounds, backend)
    return launch(_on_rank, ranks, args, timeout=3600.0)[0]


def _on_rank(
    factory: str,
    overrides: Mapping[str, object],
    contenders: Sequence[Contender],
    microbatches: Sequence[int],
    rounds: int,
    backend: str,
) -> list[Row]:
    warnings.filterwarnings("ignore")
    turns = Turns(call_factory(factory, overrides), backend)
    return [row for count in microbatches for row in _compare(turns, contenders, count, rounds)]


def _compare(turns: Turns, contenders: Sequence[Contender], count: int, rounds: int) -> list[Row]:
    made = {each: turns.make(each, count) for each in contenders}
    ready = {each: turn for each, turn in made.items() if isinstance(turn, Turn)}
    seconds = take_turns(ready, rounds)
    rows = [_row(each, made[each], count, seconds.get(each, [])) for each in contenders]
    turns.close()
    return rows


def _row(contender: Contender, turn: Turn | str, count: int, seconds: list[float]) -> Row:
    row = Row(contender.name, contender.ours, count, match=contender.match)
    if isinstance(turn, str):
        return dataclasses.replace(row, error=turn)
    slowest = [max(each) for each in zip(*gather(seconds), strict=True)]
    peak = peak_bytes(turn)
    peaks, activations = gather(peak), gather(peak - turn.gradients)
    return dataclasses.replace(row, rounds=slowest, peak=max(peaks), activations=max(activations))


def render(rows: Rows) -> str:
    """A table for each backend and M, ours above torch's, and who is ahead."""
    return by_setting(rows, _setting)


def _setting(mine: Rows) -> str:
    parts = [table(list(_HEADERS), [_cells(row, mine) for row in mine])]
    errors = [f"- {row['schedule']}: {row['error']}" for row in mine if row["error"]]
    if errors:
        parts.append("\n".join(errors))
    parts += [_verdict(mine, in_flight) for in_flight in (False, True)]
    return "\n\n".join(part for part in parts if part)


def _cells(row: dict[str, Any], mine: Rows) -> list[str]:
    by = "autosplit" if row["ours"] else "torch"
    if row["error"]:
        return [by, row["schedule"], "fails", "", "", ""]
    same = [each for each in mine if each["ours"] and each["schedule"] == row["match"]]
    return [
        by,
        row["schedule"],
        f"{1e3 * statistics.median(row['rounds']):.0f}",
        f"{1e3 * spread(row['rounds']):.0f}" if len(row["rounds"]) > 1 else "",
        f"{row['peak'] / 2**20:.0f}",
        _over(row, same[0], 1.0) if same and not same[0]["error"] else "",
    ]


def _verdict(mine: Rows, in_flight: bool) -> str:
    """Their best over ours, of steps that end together or of steps in flight."""
    chosen = [row for row in mine if row["schedule"].startswith(IN_FLIGHT) is in_flight]
    ran = [row for row in chosen if not row["error"]]
    ours = [row for row in ran if row["ours"]]
    theirs = [row for row in ran if not row["ours"]]
    if not ours or not theirs:
        return ""
    target = 1.0 if in_flight else TARGET.get(mine[0]["microbatches"], 1.0)
    best, other = (min(each, key=_median) for each in (ours, theirs))
    which = "In flight, their best" if in_flight else "Their best"
    names = f"{other['schedule']} over {best['schedule']}".replace(IN_FLIGHT, "")
    return f"{which} over ours: {_over(other, best, target)}, {names} (target {target:.2f}x)."


def _over(theirs: dict[str, Any], ours: dict[str, Any], target: float) -> str:
    """The median ratio of turns in the same round, and its quartiles."""
    low, middle, high = quartiles(ratios(theirs["rounds"], ours["rounds"]))
    figure = mark(f"{middle:.3f}x", middle >= target)
    return f"{figure} ({low:.2f}-{high:.2f})" if len(ours["rounds"]) > 1 else figure


def _median(row: dict[str, Any]) -> float:
    rounds: Sequence[float] = row["rounds"]
    return statistics.median(rounds)
