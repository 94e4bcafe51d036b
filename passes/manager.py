"""Run passes over graphs. Graphs are verified after every change, and dumped on request.

Two tuples list the passes in order. ``PASSES`` split a joint graph. ``GRAPH_PASSES`` bring each
resulting graph into the form in which it is compiled.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence

from torch import fx

from .errors import PassError
from .graph import SplitGraphs, calls
from .lowering import codegen
from .lowering.accumulate import accumulate_gradients, write_state
from .lowering.buffer_writes import mark_buffer_writes
from .lowering.forms import Changed, GraphForm, donate, propagate_strides
from .lowering.join import join_microbatches
from .lowering.missing_tangents import without_tangents
from .lowering.slices import slice_backward
from .memory_policy import BALANCED, Memory, memory_setting
from .partition.collectives import overlap_collectives
from .partition.recomputed_results import recompute_results
from .partition.split_graphs import partition_forward_backward, split_backward
from .rewrites.emit import dead_code
from .rewrites.padded_sums import concatenate_padded_sums
from .rewrites.peephole import (
    divide_backward_operators,
    drop_summed_dimensions,
    fold_powers,
    fold_views,
    forget_statistics,
    half_precision_dropout,
)
from .verify import verify, verify_graph


@dataclasses.dataclass(frozen=True)
class Pass:
    """A named rewrite of split graphs. ``run`` changes the program, and returns True if it changed
    anything.
    """

    name: str
    run: Callable[[SplitGraphs], bool]


PASSES: tuple[Pass, ...] = (
    Pass("divide_backward_operators", divide_backward_operators),
    Pass("forget_statistics", forget_statistics),
    Pass("half_precision_dropout", half_precision_dropout),
    Pass("dead_code", dead_code),
    Pass("padded_sums", concatenate_padded_sums),
    Pass("fold_views", fold_views),
    Pass("fold_powers", fold_powers),
    Pass("drop_summed_dimensions", drop_summed_dimensions),
    Pass("recompute_results", recompute_results),
    Pass("partition", partition_forward_backward),
    Pass("split_backward", split_backward),
    Pass("overlap_collectives", overlap_collectives),
    Pass("mark_buffer_writes", mark_buffer_writes),
)
"""The passes that split a joint graph, in order."""


class When(enum.Enum):
    """The moments in the compilation of a graph at which graph passes run."""

    MISSING_GRADIENTS = "before I, W and B are compiled for outputs that have no gradient"
    JOINING = "before W is compiled for several microbatches in one call"
    SLICING = "before B is compiled as slices, whose gradients are used as they are computed"
    WRITING = "before I, W or B is compiled, if it returns the new value of state"
    ACCUMULATING = "before I, W or B is compiled in the form that adds into accumulators"
    COMPILED = "after a graph is compiled, on the graphs that read its results"


@dataclasses.dataclass(frozen=True)
class GraphPass:
    """A named rewrite of graphs that a backend compiles. ``run`` returns the graphs that it
    changed.
    """

    name: str
    when: When
    run: Callable[[SplitGraphs, GraphForm], Changed]


GRAPH_PASSES: tuple[GraphPass, ...] = (
    GraphPass("without_tangents", When.MISSING_GRADIENTS, without_tangents),
    GraphPass("join", When.JOINING, join_microbatches),
    GraphPass("write_in_place", When.WRITING, write_state),
    GraphPass("slice", When.SLICING, slice_backward),
    GraphPass("accumulate", When.ACCUMULATING, accumulate_gradients),
    GraphPass("propagate_strides", When.COMPILED, propagate_strides),
    GraphPass("donate", When.COMPILED, donate),
)
"""The passes for each compiled graph, in order."""


def run_graph_passes(when: When, program: SplitGraphs, form: GraphForm) -> Changed:
    """Run the graph passes that belong to ``when`` for one compiled graph, and verify the graphs
    that the passes change.

    Args:
        when: the moment in the compilation.
        program: split graphs that ``run`` returned.
        form: the form of the graph.

    Returns:
        the changed graphs, by name.

    Raises:
        UnknownSizeError: a graph would need zeros of an unknown size.
        PassError: an invariant is broken; every violation is listed, with the pass.
    """
    changed: Changed = {}
    for entry in GRAPH_PASSES:
        if entry.when is when:
            graphs = entry.run(program, form)
            for name, module in graphs.items():
                verify_graph(name, module, entry.name)
            changed |= graphs
    return changed


def with_graph_passes(when: When, program: SplitGraphs, form: GraphForm) -> SplitGraphs:
    """The program in which graphs are replaced by those that ``run_graph_passes`` returned.

    Arguments and errors are the same as of ``run_graph_passes``.
    """
    changed = run_graph_passes(when, program, form)
    return dataclasses.replace(program, **changed)  # type: ignore[arg-type]


def run(
    joint: fx.GraphModule,
    *,
    passes: Sequence[Pass] = PASSES,
    memory: str | int | Memory = BALANCED.name,
    dump: pathlib.Path | None = None,
) -> SplitGraphs:
    """Split a joint graph into forward, fused backward, backward_input and backward_weight.

    Args:
        joint: a joint forward/backward graph with roles; it is changed in place.
        passes: the passes, in order.
        memory: the trade-off of memory, recomputation and deferred work: a setting, a name in
            ``MEMORY``, or a budget in bytes; see ``memory_setting``.
        dump: folder for numbered readable files of the graphs after each pass.

    Raises:
        PassError: ``memory`` is unknown or cannot be met; a pass broke an invariant (every
            violation is listed); a pass returned False but added or removed nodes; or no pass made
            a forward graph.
    """
    setting = memory if isinstance(memory, Memory) else memory_setting(memory)
    program = SplitGraphs(joint, setting)
    verify(program, "capture")
    step = _Dump(dump)
    step.write("capture", program)
    for entry in passes:
        sizes = _sizes(program)
        changed = entry.run(program)
        if not changed and _sizes(program) != sizes:
            raise PassError(
                f"pass {entry.name} added or removed nodes but returned False: return True from "
                "its run"
            )
        if changed:
            for module in program.graphs().values():
                module.recompile()
            verify(program, entry.name)
        step.write(entry.name, program)
    if "forward" not in program.graphs():
        raise PassError("no pass made a forward graph: add the pass 'partition' to passes=")
    return program


def _sizes(program: SplitGraphs) -> dict[str, int]:
    return {name: len(module.graph.nodes) for name, module in program.graphs().items()}


@dataclasses.dataclass
class _Dump:
    """Writes readable files of the graphs: first ``00_capture.joint.py``. After each pass, it
    writes a file for each graph whose operator counts changed, such as ``10_partition.forward.py``.
    """

    folder: pathlib.Path | None
    number: int = 0
    previous: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)

    def write(self, name: str, program: SplitGraphs) -> None:
        """Write the graphs whose operator counts have changed. Do nothing if no folder is set."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for graph, module in program.graphs().items():
            counts = Counter(str(node.target) for node in calls(module.graph))
            if graph in self.previous and counts == self.previous[graph]:
                continue
            difference = self._difference(graph, counts)
            self.previous[graph] = counts
            text = f"# {graph} after {name}: {sum(counts.values())} ops\n{difference}\n"
            text += f"{codegen.HEADER}\n\n{codegen.generate(graph, module)}"
            (self.folder / f"{self.number:02d}_{name}.{graph}.py").write_text(text)
        self.number += 1

    def _difference(self, graph: str, counts: Counter[str]) -> str:
        if graph not in self.previous:
            return ""
        previous = self.previous[graph]
        rows = [
            f"#   {counts[op] - previous[op]:+d} {op}"
            for op in sorted(previous | counts)
            if counts[op] != previous[op]
        ]
        return "\n".join(rows) + "\n"
