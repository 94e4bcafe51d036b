"""What the stages of a pipeline agree on before the first microbatch: the tensors that cross
between them, and the gradients that come back.

The ranks tell each other over the store of their process group. Whoever waits there hears of a
failure wherever it happens; nothing is left in connections for the next time to be taken for its
own; and backends need not have connected the ranks yet.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.ranks.fault_store import describe_error
from autosplit.torch_internals.distributed import is_fake, timeout_of
from autosplit.torch_internals.pipelining_stage import StageShapes
from autosplit.torch_internals.pytree import TreeSpec, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from .results import Results
    from .stage import SplitPipelineStage

_LOOK_EVERY = 0.005


class NeighbourError(PipelineError):
    """Another rank's stage failed before the first microbatch."""


class Agreement:
    """One exchange between all ranks of a pipeline. Every rank begins it in the same step. In a
    fake group, no other rank answers: ``input_args`` say what this rank's stages would receive.

    Args:
        group: of the pipeline.
        store: of the group.
        device: of this rank's stages.
        trains: whether there will be a backward.

    Attributes:
        trains: see above.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: Any, device: torch.device, trains: bool
    ) -> None:
        self.trains = trains
        self._store = store
        self._dry = is_fake(group)
        self._ranks = 1 if self._dry else group.size()
        self._patience = timeout_of(group, device).total_seconds()
        # How many a rank has begun; the same number on all.
        self._round = self._store.add(_begun(group.rank()), 1)

    def has_begun(self, rank: int) -> bool:
        """Whether a rank of the group has begun it: not before its step, and never if its stages
        are torch's own.
        """
        return self._dry or bool(self._store.add(_begun(rank), 0) >= self._round)

    def run(
        self,
        stages: Sequence[SplitPipelineStage],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        targets: Sequence[Any] | None,
    ) -> None:
        """Agree.

        Args:
            stages: this rank's, in their order.
            args: positional arguments of the first stage, for each microbatch.
            kwargs: keyword arguments, for each microbatch.
            targets: of the loss.

        Raises:
            NeighbourError: another rank failed; with its error.
            PipelineError: it said nothing in time, or this one was given no target for the loss.
            Exception: as a stage raises it. The other ranks are told.
        """
        at = stages[0].stage_index
        try:
            for stage in stages:
                at = stage.stage_index
                heard = self._inputs(stage, len(args))
                self._tell(at, "outputs", self._trace(stage, StageShapes(*heard), args, kwargs))
            for stage in reversed(stages) if self.trains else ():
                at = stage.stage_index
                if stage.is_last and targets is None:
                    raise PipelineError(
                        f"step() was given no target on the rank of stage {at}, the last one, "
                        "where loss_fn(output, target) needs it: call "
                        "schedule.step(..., target=...) there"
                    )
                self._tell(at, "gradients", _wanted(stage, self._gradients(stage)))
            self._end()
        except Exception as error:
            if not isinstance(error, NeighbourError):
                with contextlib.suppress(RuntimeError):  # the process that serves the store is gone
                    said = f"stage {at} failed: {describe_error(error)}"
                    self._store.compare_set(self._key("failure"), "", said)
            raise

    def _inputs(self, stage: SplitPipelineStage, microbatches: int) -> Any:
        """What a stage receives in each microbatch, and its structure."""
        if stage.is_first or self._is_missing(stage, stage.stage_index - 1):
            return [() if stage.is_first else stage.example_inputs()] * microbatches, None
        return self._hear(stage.stage_index - 1, "outputs")

    def _gradients(self, stage: SplitPipelineStage) -> Sequence[bool]:
        """For which of a stage's outputs a gradient comes back."""
        if stage.is_last:
            return []
        if self._is_missing(stage, stage.stage_index + 1):
            return [meta.requires_grad for meta in stage.shapes.results[0].metas]
        heard: Sequence[bool] = self._hear(stage.stage_index + 1, "gradients")
        return heard

    def _is_missing(self, stage: SplitPipelineStage, neighbour: int) -> bool:
        rank = stage.stage_index_to_group_rank[neighbour]
        return self._dry and rank != stage.group_rank

    def _trace(
        self,
        stage: SplitPipelineStage,
        agreed: StageShapes,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Any, TreeSpec | None]:
        """Trace a stage for the first microbatch, and for those that are of other shapes; what the
        next one is told.
        """
        results: list[Results] = []
        first = None
        for chunk, metas in enumerate(agreed.inputs):
            given: Any = args[chunk] if stage.is_first else [m.empty(stage.device) for m in metas]
            (given, named), shapes = _apart((given, kwargs[chunk]))
            for meta, tensor in zip(metas, given, strict=False):
                tensor.requires_grad_(meta.requires_grad)
            if chunk and shapes == first:
                results.append(results[0])
                continue
            first = first or shapes
            with torch.set_grad_enabled(self.trains):
                results.append(stage.trace(agreed.arguments(given), named, first=not chunk))
        outputs = [each.metas for each in results]
        stage.shapes = replace(agreed, results=results, gradients=outputs)
        return outputs, results[0].structure

    def _tell(self, stage: int, what: str, message: Any) -> None:
        with warnings.catch_warnings():  # torch's own class of a leaf has deprecated itself
            warnings.simplefilter("ignore", FutureWarning)
            self._store.set(self._key(f"{stage}/{what}"), pickle.dumps(message))
        # Nobody is still at the last exchange but one, as all have begun the last.
        self._store.delete_key(self._key(f"{stage}/{what}", self._round - 2))

    def _hear(self, stage: int, what: str) -> Any:
        key = self._key(f"{stage}/{what}")
        self._wait(lambda: self._store.check([key]), f"stage {stage}")
        return pickle.loads(self._store.get(key))

    def _end(self) -> None:
        """Wait until all ranks have agreed: none of them runs a microbatch if one has failed."""
        key = self._key("done")
        self._store.add(key, 1)
        self._wait(lambda: self._store.add(key, 0) == self._ranks, "the other ranks")

    def _wait(self, there: Callable[[], bool], whom: str) -> None:
        deadline, failure = time.monotonic() + self._patience, self._key("failure")
        while not there():
            if self._store.check([failure]):
                raise NeighbourError(self._store.get(failure).decode())
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"waited {self._patience:.3g} s for {whom} to be traced: is a rank stuck? A "
                    "longer timeout of the process group leaves more time"
                )
            time.sleep(_LOOK_EVERY)

    def _key(self, what: str, number: int | None = None) -> str:
        return f"autosplit/stages/{self._round if number is None else number}/{what}"


def _begun(rank: int) -> str:
    return f"autosplit/stages/begun by {rank}"


def _wanted(stage: SplitPipelineStage, come: Sequence[bool]) -> list[bool]:
    """Which inputs' gradients a stage sends back where these of its outputs come, of which the last
    one has none.
    """
    agreed = stage.shapes
    given = agreed.results[0].inputs_given(None if stage.is_last else come)
    wanted = [meta.requires_grad and g for meta, g in zip(agreed.inputs[0], given, strict=False)]
    gradients = [
        [meta if comes else None for meta, comes in zip(each.metas, come, strict=False)]
        for each in agreed.results
    ]
    stage.shapes = replace(agreed, gradients=gradients, wanted=wanted)
    return wanted


def _apart(tree: Any) -> tuple[Any, Any]:
    """A tree with its tensors apart from what they were computed by; and their shapes."""
    leaves, spec = tree_flatten(tree)
    made = [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves]
    return tree_unflatten(made, spec), shapes
