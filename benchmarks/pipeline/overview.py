"""README's table of steps and memory, from the results of ``benchmarks.pipeline``."""

from __future__ import annotations

import statistics

from tabulate import tabulate

from ..results import Results, Rows

START = "<!-- written by python -m benchmarks.pipeline -->\n"
END = "<!-- end -->\n"
_TWO = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
_MORE = ("zb-h1", "zb-v", "v-half")
_BASE = "1f1b, fused"
_HEADERS = ("ranks", "autosplit", "torch", "step", "peak of activations")


def overview(results: Results) -> str:
    """Ours beside torch's runtime on two ranks, and beside fused 1F1B on four and eight.

    A step's figure is the median over rounds of the ratio, ours over the other.
    """
    rows = [*_beside_torch(results.rows("peers")), *_more_ranks(results)]
    return tabulate(rows, _HEADERS, tablefmt="github", disable_numparse=True) + "\n"


def _beside_torch(rows: Rows) -> list[list[str]]:
    by_name = {row["name"]: row for row in rows}
    table = []
    for ours, theirs in _TWO.items():
        one, other = (
            by_name[f"eager, M=4: {each}"] for each in (f"ours {ours}", f"torch {theirs}")
        )
        ratio = statistics.median(
            a / b for a, b in zip(one["rounds"], other["rounds"], strict=True)
        )
        table.append(["2", ours, theirs, f"{ratio:.2f}x", f"{one['peak'] / other['peak']:.2f}x"])
    return table


def _more_ranks(results: Results) -> list[list[str]]:
    steps = {row["name"]: row["measured"] for row in results.rows("standin")}
    peaks = {row["name"]: row["allocated"] for row in results.rows("memory")}
    table = []
    for ranks in (4, 8):
        step, peak = f"N={ranks}, F:I:W = 3:3:3: ", f"{ranks} ranks: "
        for name in _MORE:
            ratio = steps[step + name] / steps[step + _BASE]
            held = peaks[peak + name] / peaks[peak + _BASE]
            table.append([str(ranks), name, "1F1B's order", f"{ratio:.2f}x", f"{held:.2f}x"])
    return table


def written(results: Results, text: str) -> str:
    """README with the table as the results have it."""
    before, _, rest = text.partition(START)
    return before + START + "\n" + overview(results) + "\n" + END + rest.partition(END)[2]
