"""``SplitStage``: makes one stage from its module, of one graph or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autosplit.errors import (
    CaptureError,
    FailingCallError,
    FirstCallError,
    reworded,
)
from autosplit.pipeline.engine.boundaries import NamedLoss
from autosplit.pipeline.engine.partial_stage import PartialStage
from autosplit.pipeline.engine.stage_protocols import TrainableStage, unsupported_output
from autosplit.runtime.options import SplitOptions
from autosplit.stage import Stage
from autosplit.torch_internals.distributed import fsdp_part
from autosplit.torch_internals.pytree import class_of, is_flat


@dataclass(frozen=True)
class SplitStage:
    """The ``StageFactory`` that makes an ``autosplit.Stage``, or a ``PartialStage`` for a module
    that cannot be captured in one graph.

    Attributes:
        options: how stages are split.
        fullgraph: whether to refuse a module that cannot be captured in one graph: True, or the
            name of the trainer's option that needs one graph.
    """

    options: SplitOptions
    fullgraph: bool | str = False

    def __call__(
        self,
        module: nn.Module,
        args: list[Tensor],
        *,
        index: int,
        varying: Sequence[Sequence[Any]] = (),
    ) -> TrainableStage:
        """Make a stage for ``module(*args)``; see ``StageFactory``.

        Args:
            module: the stage's module.
            args: example arguments of the module.
            index: the stage's index in the pipeline.
            varying: further example inputs. Sizes in which they differ from ``args`` are symbols in
                the first capture.

        Raises:
            CaptureError: the module cannot be captured, and cannot or must not run as several
                graphs.
            PipelineError: the module returns neither a tensor nor a tuple of tensors.
        """
        try:
            stage = Stage(module, args, index=index, options=self.options, varying=varying)
        except (FailingCallError, FirstCallError):
            raise
        except CaptureError as error:
            return self._in_parts(module, args, index, error)
        spec = stage.functions.capture.output_spec
        if not (is_flat(spec) or class_of(spec) is NamedLoss):
            raise unsupported_output(index, class_of(spec))
        return stage

    def _in_parts(
        self, module: nn.Module, args: list[Tensor], index: int, error: CaptureError
    ) -> TrainableStage:
        """Make a ``PartialStage``, or raise ``error``."""
        needed_by = "fully_shard" if fsdp_part(module) is not None else self.fullgraph
        if isinstance(needed_by, str):
            text = f"Such a stage can run as several graphs, but {needed_by} needs one graph"
            raise reworded(error, f"{error}\n  {text}") from error
        if needed_by:
            raise error
        return PartialStage(module, args, index=index, options=self.options, error=error)


def traced(stages: Mapping[int, TrainableStage]) -> dict[int, Stage]:
    """The stages that are an ``autosplit.Stage``. A user's stage factory may make other stages."""
    return {index: stage for index, stage in stages.items() if isinstance(stage, Stage)}
