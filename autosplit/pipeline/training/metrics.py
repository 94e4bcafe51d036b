"""What the last step of a trainer took, as numbers for a logger, and as text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.passes.analysis.operator_cost import graph_flops
from autosplit.pipeline.engine.stages import traced
from autosplit.pipeline.schedule.action import ActionKind
from autosplit.stage import Stage
from autosplit.text.figures import size_text

from .runner import Runner

_UNITS: dict[str, Callable[[float], str]] = {
    "seconds": lambda value: f"{1e3 * value:,.1f} ms",
    "samples_per_s": lambda value: f"{value:,.1f}",
    "tokens_per_s": lambda value: f"{value:,.0f}",
    "flops_per_s": lambda value: f"{value / 1e12:,.3g} TFLOP/s",
    "mfu": lambda value: f"{value:.1%}",
    "bubble": lambda value: f"{value:.1%}",
    "peak_memory": lambda value: size_text(round(value)),
}


class StepMetrics:
    """The last step that somebody waited for, on one rank.

    Args:
        runner: ran it.
        rank: whose actions of the schedule are counted.
        device: where.

    Attributes:
        losses: of the microbatches; None: there was no such step.
        computing: seconds of forward and backward, until all ranks were done.
        seconds: with the optimizer.
    """

    def __init__(self, runner: Runner, rank: int, device: torch.device) -> None:
        self._runner, self._rank, self._device = runner, rank, device
        self._flops: dict[Stage, int] = {}
        self.losses: Tensor | None = None
        self.computing = self.seconds = 0.0

    def numbers(self, peak_flops: float | None) -> dict[str, float]:
        """See ``StageTrainer.metrics``."""
        runner, step = self._runner, self._runner.memory.step
        if self.losses is None or step is None:
            raise PipelineError(
                "there are no metrics of the last step: call step(...) first. A step_async(...) "
                "has none, as nobody waited for its end"
            )
        found = {"loss": self.losses.mean().item(), "seconds": self.seconds}
        metas = [each for each in step.parts["inputs"] if each and each.shape]
        if metas:
            found["samples_per_s"] = metas[0].shape[0] / self.seconds
            if len(metas[0].shape) > 1 and not metas[0].dtype.is_floating_point:
                found["tokens_per_s"] = metas[0].shape[:2].numel() / self.seconds
        if flops := self._flops_of_step():
            found["flops_per_s"] = flops / self.seconds
            if peak_flops is not None:
                found["mfu"] = found["flops_per_s"] / peak_flops
        computed = [span for span in runner.spans if span.action.kind.is_compute]
        if computed:
            busy = sum(span.end - span.start for span in computed)
            found["bubble"] = max(0.0, 1.0 - busy / self.computing)
        if runner.memory.recorder is not None:
            found["peak_memory"] = float(max(each.total for each in runner.memory.recorder.bands()))
        elif self._device.type != "cpu":
            found["peak_memory"] = float(torch.accelerator.max_memory_allocated(self._device))
        return found

    def _flops_of_step(self) -> int:
        """Of the products in this rank's graphs; 0 where not all its stages have graphs."""
        stages = self._runner.stages
        known = traced(stages)
        if len(known) < len(stages):
            return 0
        for stage in known.values():
            if stage not in self._flops:
                graphs = stage.functions.graphs
                used = [each for each in (graphs.forward, graphs.backward) if each is not None]
                self._flops[stage] = sum(graph_flops(each.graph) for each in used)
        actions = self._runner.schedule.ranks[self._rank]
        forwards = [each.stage for each in actions if each.kind is ActionKind.FORWARD]
        return sum(self._flops[known[at]] for at in forwards)


def metrics_table(found: dict[str, float]) -> str:
    """A row a number."""
    rows = [[name, _UNITS.get(name, "{:.6g}".format)(value)] for name, value in found.items()]
    return tabulate(rows, colalign=("left", "right"), disable_numparse=True)
