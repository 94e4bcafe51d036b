"""Checks of the arguments of ``SplitPipelineStage``, and the errors of its captures and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import CaptureError, FailingCallError, PipelineError, with_code
from autosplit.module import SplitModule
from autosplit.pipelining.results import described
from autosplit.runtime.refusals import misfit

_TORCHS = (
    "around module = autosplit.split(submodule), with "
    "dw_builder=autosplit.pipelining.dw_builder(module)"
)


def check_group() -> None:
    """Refuse to construct a stage without a process group.

    Raises:
        PipelineError: no default process group is initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PipelineError(
            with_code(
                "a stage of torch.distributed.pipelining needs a process group: call "
                "torch.distributed.init_process_group(), or use autosplit.process_group()",
                wrong="stage = SplitPipelineStage(module, 0, 2, device)  # python train.py",
                right="with autosplit.process_group():\n"
                "    stage = SplitPipelineStage(module, 0, 2, device)  "
                "# torchrun --nproc-per-node 2 train.py",
            )
        )


def unwrapped(submodule: nn.Module, stage_index: int) -> nn.Module:
    """The module to capture: ``submodule`` without DistributedDataParallel, torch.compile and split
    modules around it.

    Raises:
        PipelineError: ``submodule`` is not a module.
    """
    if isinstance(submodule, DistributedDataParallel):
        return unwrapped(submodule.module, stage_index)
    if not isinstance(submodule, nn.Module):
        raise PipelineError(
            f"stage {stage_index}: expected an nn.Module, got {type(submodule).__name__}"
        )
    if hasattr(submodule, "_orig_mod"):  # of torch.compile: capture the original
        return unwrapped(submodule._orig_mod, stage_index)  # type: ignore[arg-type]
    return submodule.unsplit if isinstance(submodule, SplitModule) else submodule


def refuse_unfit_call(
    owner: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool
) -> None:
    """Refuse arguments that the module's forward does not take.

    Raises:
        PipelineError: names the arguments and their origin.
    """
    text = misfit(module, args, kwargs)
    if text and first and not args and not kwargs:
        raise PipelineError(
            f"step() got no inputs on the rank of {owner}, whose forward {text}. On this rank call "
            "schedule.step(batch, ...) with the whole batch; ranks without the first stage pass "
            "none"
        )
    if text:
        source = "step() got" if first else "the previous stage returns"
        by_name = f", by name {', '.join(sorted(kwargs))}" if kwargs else ", and nothing by name"
        raise PipelineError(f"{owner} {text}; {source} {len(args)} positional argument(s){by_name}")


def refused_capture(owner: str, leaves: Sequence[Any], error: CaptureError) -> Exception:
    """The error to raise if a stage's module cannot be captured.

    Args:
        owner: the name of the stage.
        leaves: the leaves of the stage's inputs.
        error: the error of the capture.

    Returns:
        A PipelineError if an operator refuses the inputs, else a CaptureError.
    """
    refusal: Exception
    if isinstance(error, FailingCallError):
        tensors = described([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        refusal = PipelineError(f"{owner} cannot be called with {tensors or 'nothing'}: {error}")
    else:
        refusal = CaptureError(
            f"{owner} must be one graph: {error}\nOr keep torch's PipelineStage {_TORCHS}; it may "
            "have graph breaks",
            because=error.because,
        )
    refusal.__cause__ = error
    return refusal


def failed_call(call: str, error: Exception) -> Exception:
    """The error to raise if the call of a graph raises.

    A kernel's RuntimeError becomes a PipelineError that names the call. Other errors are unchanged,
    with the call as a note.
    """
    if type(error) is RuntimeError:
        failure = PipelineError(f"{call} failed: {error}")
        failure.__cause__ = error
        return failure
    error.add_note(f"in {call}")
    return error
