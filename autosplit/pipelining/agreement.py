"""The agreement of a pipeline's stages before the first microbatch: the shapes of the tensors
between them, and the gradients that come back.

Ranks exchange shapes over the store of their process group, for three reasons. A rank that waits
for the store learns of a failure on any rank; no stale message is left in a connection; and the
backend need not have connected the ranks yet.
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

_POLL_SECONDS = 0.005


class NeighbourError(PipelineError):
    """Another rank's stage failed before the first microbatch."""


class RowAgreement:
    """One exchange of shapes between all ranks of a pipeline.

    Every rank begins the exchange in the same step. In a fake group no other rank answers, so each
    stage's ``input_args`` describe its inputs.

    Args:
        group: the process group of the pipeline.
        store: the store of the group.
        device: the device of this rank's stages.
        trains: whether the step has a backward.

    Attributes:
        trains: as passed.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: Any, device: torch.device, trains: bool
    ) -> None:
        self.trains = trains
        self._store = store
        self._is_fake = is_fake(group)
        self._ranks = 1 if self._is_fake else group.size()
        self._timeout = timeout_of(group, device).total_seconds()
        # How many exchanges this rank has begun; equal on all ranks.
        self._number = self._store.add(_begun_key(group.rank()), 1)

    def has_begun(self, rank: int) -> bool:
        """Whether a rank has begun this exchange.

        A rank begins the exchange in its step, and never if its stages are torch's own.
        """
        return self._is_fake or bool(self._store.add(_begun_key(rank), 0) >= self._number)

    def run(
        self,
        stages: Sequence[SplitPipelineStage],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        targets: Sequence[Any] | None,
    ) -> None:
        """Agree with the other ranks on the shapes between all stages. Collective.

        Args:
            stages: this rank's stages by index.
            args: per microbatch, the positional arguments of the first stage.
            kwargs: per microbatch, the keyword arguments.
            targets: the targets of the loss.

        Raises:
            NeighbourError: another rank failed; names that rank's error.
            PipelineError: another rank did not answer in time, or the rank of the last stage got
                no target.
            Exception: the error of one of this rank's stages; other ranks raise NeighbourError.
        """
        index = stages[0].stage_index
        try:
            for stage in stages:
                index = stage.stage_index
                inputs = StageShapes(*self._inputs(stage, len(args)))
                self._share(index, "outputs", self._trace(stage, inputs, args, kwargs))
            for stage in reversed(stages) if self.trains else ():
                index = stage.stage_index
                if stage.is_last and targets is None:
                    raise PipelineError(
                        f"step() got no target on the rank of stage {index}, the last one, "
                        "where loss_fn(output, target) needs it: call "
                        "schedule.step(..., target=...) there"
                    )
                self._share(index, "gradients", _wanted(stage, self._gradients(stage)))
            self._end()
        except Exception as error:
            if not isinstance(error, NeighbourError):
                with contextlib.suppress(RuntimeError):  # the process that serves the store is gone
                    report = f"stage {index} failed: {describe_error(error)}"
                    self._store.compare_set(self._key("failure"), "", report)
            raise

    def _inputs(self, stage: SplitPipelineStage, microbatches: int) -> Any:
        """Return (inputs of a stage for each microbatch, their pytree structure if they are one
        argument, else None).
        """
        if stage.is_first or self._is_missing(stage, stage.stage_index - 1):
            return [() if stage.is_first else stage.example_inputs()] * microbatches, None
        return self._receive(stage.stage_index - 1, "outputs")

    def _gradients(self, stage: SplitPipelineStage) -> Sequence[bool]:
        """For each output of a stage, whether a gradient comes back."""
        if stage.is_last:
            return []
        if self._is_missing(stage, stage.stage_index + 1):
            return [meta.requires_grad for meta in stage.shapes.results[0].metas]
        flags: Sequence[bool] = self._receive(stage.stage_index + 1, "gradients")
        return flags

    def _is_missing(self, stage: SplitPipelineStage, neighbour: int) -> bool:
        rank = stage.stage_index_to_group_rank[neighbour]
        return self._is_fake and rank != stage.group_rank

    def _trace(
        self,
        stage: SplitPipelineStage,
        agreed: StageShapes,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Any, TreeSpec | None]:
        """Trace a stage for the first microbatch, and again for each microbatch of other shapes.

        Returns:
            (outputs per microbatch, their pytree structure if they are one argument of the next
            stage).
        """
        results: list[Results] = []
        first = None
        for chunk, metas in enumerate(agreed.inputs):
            inputs: Any = args[chunk] if stage.is_first else [m.empty(stage.device) for m in metas]
            (inputs, by_name), shapes = _detach((inputs, kwargs[chunk]))
            for meta, tensor in zip(metas, inputs, strict=False):
                tensor.requires_grad_(meta.requires_grad)
            if chunk and shapes == first:
                results.append(results[0])
                continue
            first = first or shapes
            with torch.set_grad_enabled(self.trains):
                results.append(stage.trace(agreed.arguments(inputs), by_name, first=not chunk))
        outputs = [result.metas for result in results]
        stage.shapes = replace(agreed, results=results, gradients=outputs)
        return outputs, results[0].structure

    def _share(self, stage: int, topic: str, message: Any) -> None:
        """Publish a message about a stage in the store."""
        with warnings.catch_warnings():  # torch's own class of a leaf has deprecated itself
            warnings.simplefilter("ignore", FutureWarning)
            self._store.set(self._key(f"{stage}/{topic}"), pickle.dumps(message))
        # All ranks have begun the previous exchange, so they have ended the one before it.
        self._store.delete_key(self._key(f"{stage}/{topic}", self._number - 2))

    def _receive(self, stage: int, topic: str) -> Any:
        """Wait for a message about a stage, and return it."""
        key = self._key(f"{stage}/{topic}")
        self._wait(lambda: self._store.check([key]), f"stage {stage}")
        return pickle.loads(self._store.get(key))

    def _end(self) -> None:
        """Wait until all ranks have agreed. If a rank has failed, no rank runs a microbatch."""
        key = self._key("done")
        self._store.add(key, 1)
        self._wait(lambda: self._store.add(key, 0) == self._ranks, "the other ranks")

    def _wait(self, is_ready: Callable[[], bool], peer: str) -> None:
        """Poll until ``is_ready()`` is true, any rank has failed, or the timeout has passed."""
        deadline, failure = time.monotonic() + self._timeout, self._key("failure")
        while not is_ready():
            if self._store.check([failure]):
                raise NeighbourError(self._store.get(failure).decode())
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"waited {self._timeout:.3g} s for {peer} to be traced. Is a rank stuck? A "
                    "longer timeout of the process group allows more time"
                )
            time.sleep(_POLL_SECONDS)

    def _key(self, topic: str, number: int | None = None) -> str:
        return f"autosplit/stages/{self._number if number is None else number}/{topic}"


def _begun_key(rank: int) -> str:
    return f"autosplit/stages/begun by {rank}"


def _wanted(stage: SplitPipelineStage, output_flags: Sequence[bool]) -> list[bool]:
    """For each input of a stage, whether the stage sends a gradient for it back.

    Args:
        stage: the stage.
        output_flags: for each output, whether a gradient comes back; not used for the last stage.
    """
    agreed = stage.shapes
    input_flags = agreed.results[0].inputs_given(None if stage.is_last else output_flags)
    wanted = [
        meta.requires_grad and gets
        for meta, gets in zip(agreed.inputs[0], input_flags, strict=False)
    ]
    gradients = [
        [meta if comes else None for meta, comes in zip(result.metas, output_flags, strict=False)]
        for result in agreed.results
    ]
    stage.shapes = replace(agreed, gradients=gradients, wanted=wanted)
    return wanted


def _detach(tree: Any) -> tuple[Any, Any]:
    """Return (tree with detached tensors, shapes and dtypes of its leaves)."""
    leaves, spec = tree_flatten(tree)
    detached = [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves]
    return tree_unflatten(detached, spec), shapes
