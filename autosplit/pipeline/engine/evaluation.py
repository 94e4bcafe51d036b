"""Evaluate a pipeline: the forwards of a schedule, and stages that only run forward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.stage_protocols import flat_outputs
from autosplit.pipeline.engine.transport import REFUSED, stands_for_refused
from autosplit.pipeline.schedule.schedule import Action, ActionKind, Schedule
from autosplit.torch_internals.state import preserve_modes, versions


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule of ``microbatches`` forwards of each stage, with the placement of ``schedule``.

    Each rank runs forwards in the order in which they could start if the rank were never busy. So
    no rank waits while it could run another of its forwards.
    """
    order = sorted(
        itertools.product(range(schedule.stages), range(microbatches)),
        key=lambda pair: (sum(pair), pair),
    )
    return replace(
        schedule,
        name=f"{schedule.name}, forward only",
        microbatches=microbatches,
        ranks=tuple(
            tuple(
                Action(stage, ActionKind.FORWARD, microbatch)
                for stage, microbatch in order
                if schedule.placement[stage] == rank
            )
            for rank in range(len(schedule.ranks))
        ),
        split_backward=False,
        crosses_step=False,
    )


class ModuleStage:
    """A module as a stage that only runs forward.

    Args:
        module: the stage's module.
        index: the stage's index in the pipeline.
        shared: positions of arguments that other stages may read as well.
        gathering: ``gathering()`` returns the context for a call of the module, in which its
            sharded parameters are whole.
        refuses: whether an error of the module refuses only its microbatch, and the other
            microbatches run on; otherwise ``forward`` raises the error. False if the module
            communicates with other ranks, which would wait for it.

    Attributes:
        part_names: names of the parts of the loss in the outputs; None before the first call.
        refused: by microbatch, the error of the module, until ``refused`` is cleared.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        shared: Sequence[int] = (),
        gathering: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        *,
        refuses: bool = False,
    ) -> None:
        self._module, self._gathering = module, gathering
        self._index = index
        self._shared = shared
        self._refuses = refuses
        self.part_names: tuple[str, ...] | None = None
        self.refused: dict[int, Exception] = {}

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        """Return the module's outputs; empties ``inputs``. A refused microbatch has ``REFUSED`` in
        place of its outputs.

        Raises:
            PipelineError: the module returns neither a tensor nor a tuple of tensors, writes into
                an argument that other stages read, or returns other parts of the loss than before.
        """
        if not self._refuses:
            return self._outputs(inputs)
        if any(map(stands_for_refused, inputs)):
            inputs.clear()
            return REFUSED
        try:
            return self._outputs(inputs)
        except Exception as error:
            inputs.clear()
            self.refused[microbatch] = error
            return REFUSED

    def _outputs(self, inputs: list[Tensor]) -> list[Tensor]:
        args = tuple(inputs)
        inputs.clear()
        versions_before = versions(args[place] for place in self._shared)
        with self._gathering():
            outputs = self._module(*args)
        if versions(args[place] for place in self._shared) != versions_before:
            raise PipelineError(
                f"stage {self._index} writes in place into an input that other stages also read, "
                "so they would read the changed values. Let the stage's module write into a copy"
            )
        outputs, self.part_names = flat_outputs(self._index, outputs, self.part_names)
        return outputs


@contextlib.contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which modules are in eval mode; it restores the mode of every submodule at its
    end.
    """
    roots = list(modules)
    with preserve_modes(roots):
        for root in roots:
            root.eval()
        yield
