"""Running the pipeline forward only, on the modules themselves."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.schedule.action import Action, ActionKind
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.torch_internals.module_state import modes_kept
from autosplit.torch_internals.storage import versions


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of ``schedule`` on the same ranks, each rank's in the order in which they could
    start if it were never busy; so nothing waits for what its own rank could do first.
    """
    order = sorted(
        itertools.product(range(schedule.stages), range(schedule.microbatches)),
        key=lambda each: (sum(each), each),
    )
    return Schedule(
        name=f"{schedule.name}, forward only",
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        ranks=tuple(
            tuple(
                Action(stage, ActionKind.FORWARD, microbatch)
                for stage, microbatch in order
                if schedule.home(stage, microbatch) == rank
            )
            for rank in range(len(schedule.ranks))
        ),
        placement=schedule.placement,
        split_backward=False,
        mirror=schedule.mirror,
    )


class ModuleStage:
    """A module as a stage that only runs forward.

    Args:
        module: the stage's module.
        index: the stage's place in the pipeline.
        shared: places of arguments that other stages may take as well.
        gather: gathers its parameters, where they are sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        shared: Sequence[int] = (),
        gather: Callable[[], None] = lambda: None,
    ) -> None:
        self._gather = gather
        self._module = module
        self._index = index
        self._shared = shared

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        """The module's outputs; clears ``inputs``.

        Raises:
            PipelineError: the module puts out something else than a tensor or a tuple of tensors,
                or writes into an argument that other stages take.
        """
        args = tuple(inputs)
        inputs.clear()
        before = versions(args[place] for place in self._shared)
        self._gather()
        outputs = self._module(*args)
        if versions(args[place] for place in self._shared) != before:
            raise PipelineError(
                f"stage {self._index} writes in place into an input that other stages take, which "
                "would find it changed: let its module write into a copy"
            )
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        if not isinstance(outputs, tuple | list) or not all(
            isinstance(output, Tensor) for output in outputs
        ):
            raise PipelineError(
                f"stage {self._index} must put out a tensor or a tuple of tensors; "
                f"got a {type(outputs).__name__}"
            )
        return list(outputs)


@contextlib.contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode; afterwards each submodule is as it was before."""
    roots = list(modules)
    with modes_kept(roots):
        for root in roots:
            root.eval()
        yield
