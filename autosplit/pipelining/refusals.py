"""What ``SplitPipelineStage`` is given, checked before anything is captured.

Errors of a stage's forward as the user meets them: the forward's own, and those of its graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import CaptureError, FailingCallError, PipelineError
from autosplit.module import SplitModule
from autosplit.pipelining.results import described
from autosplit.runtime.refusals import misfit

_TORCHS = (
    "around module = autosplit.split(submodule), with "
    "dw_builder=autosplit.pipelining.dw_builder(module)"
)


def check_group() -> None:
    """Refuse to make a stage without a process group.

    Raises:
        PipelineError: says what is missing.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PipelineError(
            "a stage of torch.distributed.pipelining needs a process group: call "
            "torch.distributed.init_process_group(), or use autosplit.pipeline.process_group()"
        )


def unwrapped(submodule: nn.Module, stage_index: int) -> nn.Module:
    """The module to capture.

    Raises:
        PipelineError: it is no module.
    """
    if isinstance(submodule, DistributedDataParallel):
        return unwrapped(submodule.module, stage_index)
    if not isinstance(submodule, nn.Module):
        raise PipelineError(
            f"stage {stage_index}: expected an nn.Module, got {type(submodule).__name__}"
        )
    if hasattr(submodule, "_orig_mod"):  # of torch.compile, which goes through parts by itself
        return unwrapped(submodule._orig_mod, stage_index)  # type: ignore[arg-type]
    return submodule.unsplit if isinstance(submodule, SplitModule) else submodule


def refuse_unfit_call(
    owner: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool
) -> None:
    """Refuse arguments that the module's forward does not take.

    Raises:
        PipelineError: says which, and where they come from.
    """
    text = misfit(module, args, kwargs)
    if text and first and not args and not kwargs:
        raise PipelineError(
            f"step() was given no inputs on the rank of {owner}, whose forward {text}. On this "
            "rank call schedule.step(batch, ...) with the whole batch; ranks without the first "
            "stage give none"
        )
    if text:
        source = "step() was given" if first else "the stage before hands on"
        by_name = f", by name {', '.join(sorted(kwargs))}" if kwargs else ", and nothing by name"
        raise PipelineError(f"{owner} {text}; {source} {len(args)} positional argument(s){by_name}")


def refused_capture(owner: str, leaves: Sequence[Any], error: CaptureError) -> Exception:
    """What to raise where a stage's module cannot be captured.

    Args:
        owner: the stage.
        leaves: of its inputs.
        error: that of the capture.

    Returns:
        A PipelineError where an operator refuses the inputs, else a CaptureError.
    """
    made: Exception
    if isinstance(error, FailingCallError):
        tensors = described([each for each in leaves if isinstance(each, Tensor)])
        made = PipelineError(f"{owner} cannot be called with {tensors or 'nothing'}: {error}")
    else:
        made = CaptureError(
            f"{owner} must be one graph: {error}\nOr keep torch's PipelineStage {_TORCHS}; it may "
            "have graph breaks",
            because=error.because,
        )
    made.__cause__ = error
    return made


def failed_call(what: str, error: Exception) -> Exception:
    """What to raise where a graph's call raises: a kernel's error as a PipelineError that says
    whose it is, any other as it is, with that as a note.
    """
    if type(error) is RuntimeError:
        made = PipelineError(f"{what} failed: {error}")
        made.__cause__ = error
        return made
    error.add_note(f"in {what}")
    return error
