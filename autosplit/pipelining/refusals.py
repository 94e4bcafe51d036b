"""What ``SplitPipelineStage`` is given, checked before anything is captured.

Errors of a stage's forward as the user meets them: the forward's own, and those of its graph.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.capture.diagnosis import is_raised_by_forward, is_torch_file
from autosplit.capture.side_effects import error_of_call
from autosplit.errors import CaptureError, FailingCallError, PipelineError
from autosplit.module import SplitModule
from autosplit.pipelining.results import described
from autosplit.torch_internals.pipelining_stage import StageShapeError, TensorMeta

_NOT_TAKEN = {
    "dw_builder": "the stage runs W itself. Leave it out; or keep torch's PipelineStage around "
    "module = autosplit.split(submodule), with dw_builder=autosplit.pipelining.dw_builder(module)",
    "input_grads": "stages agree on gradients before the first microbatch. Leave it out",
    "output_grads": "stages agree on gradients before the first microbatch. Leave it out",
    "get_mesh": "distributed tensors do not cross its ends. Leave it out",
}
"""Arguments of torch's stage that a split one does not take, and why."""


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that are torch's, or nobody's.

    Raises:
        PipelineError: torch's stage takes it.
        TypeError: nor does torch's stage.
    """
    for name, value in given.items():
        if name not in _NOT_TAKEN:
            raise TypeError(
                f"SplitPipelineStage.__init__() got an unexpected keyword argument {name!r}"
            )
        if value is not None:
            raise PipelineError(f"SplitPipelineStage takes no {name}: {_NOT_TAKEN[name]}")


def check_group(stage_index: int, num_stages: int, group: Any) -> None:
    """Refuse a place that is not in the pipeline, and a group that cannot hold it.

    Raises:
        PipelineError: says what does not fit.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PipelineError(
            "a stage of torch.distributed.pipelining needs a process group: call "
            "torch.distributed.init_process_group(), or use autosplit.pipeline.process_group()"
        )
    if not 0 <= stage_index < num_stages:
        raise PipelineError(
            f"expected a stage_index from 0 to {num_stages - 1} of num_stages={num_stages}, got "
            f"{stage_index}"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise PipelineError(
            f"group must be a ProcessGroup or None, got {type(group).__name__}; give arguments "
            "from the seventh on by name, torch's stage has others there in some versions"
        )
    size = dist.get_world_size(group)
    if dist.get_rank(group) < 0:
        raise PipelineError(
            f"stage {stage_index}: this rank is not in its process group; each rank makes the "
            "stages that it holds, with the group of the pipeline"
        )
    if size > num_stages:
        raise PipelineError(
            f"the process group has {size} ranks for {num_stages} stages: a rank would hold none. "
            "Give a group of at most that many, such as a dimension of a DeviceMesh "
            "(group=mesh['pp'].get_group())"
        )


@contextlib.contextmanager
def no_context(_: Iterable[Tensor]) -> Iterator[None]:
    """Nothing around a capture: no lazy gradient is in ``.grad`` of these parameters."""
    yield


def unwrapped(submodule: nn.Module, stage_index: int) -> nn.Module:
    """The module to capture.

    Raises:
        PipelineError: it is compiled already, or no module.
    """
    if isinstance(submodule, DistributedDataParallel):
        return unwrapped(submodule.module, stage_index)
    if not isinstance(submodule, nn.Module):
        raise PipelineError(
            f"stage {stage_index}: expected an nn.Module, got {type(submodule).__name__}"
        )
    compiled = [name for name, part in submodule.named_modules() if hasattr(part, "_orig_mod")]
    if compiled:
        where = f"its part {compiled[0]!r}" if compiled[0] else "the module"
        raise PipelineError(
            f"stage {stage_index}: {where} is compiled by torch.compile, which hides its graph. "
            "Give the module itself, and backend='inductor' to have its F, I, W and B compiled"
        )
    return submodule.unsplit if isinstance(submodule, SplitModule) else submodule


def checked_examples(
    owner: str, argument: str, given: Tensor | Sequence[Tensor] | None
) -> list[Tensor] | None:
    """Examples as a list.

    Raises:
        PipelineError: they are not tensors.
    """
    if given is None:
        return None
    found = [given] if isinstance(given, Tensor) else given
    if not isinstance(found, (tuple, list)) or not all(isinstance(t, Tensor) for t in found):
        raise PipelineError(
            f"{owner}: {argument} must be a tensor or a tuple of tensors, got "
            f"{type(given).__name__}"
        )
    return list(found)


def refuse_unfit_call(
    owner: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool
) -> None:
    """Refuse arguments that the module's forward does not take.

    Raises:
        PipelineError: says which, and where they come from.
    """
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if first and not args and not kwargs:
            raise PipelineError(
                f"step() was given no inputs on the rank of {owner}, whose forward takes "
                f"{signature}: on this rank call schedule.step(batch, ...) with the whole batch; "
                "ranks without the first stage give none"
            ) from error
        source = "step() was given" if first else "the stage before hands on"
        by_name = f", by name {', '.join(sorted(kwargs))}" if kwargs else ", and nothing by name"
        raise PipelineError(
            f"{owner} takes {signature}: {error}; {source} {len(args)} positional "
            f"argument(s){by_name}"
        ) from error


def refuse_difference(
    owner: str,
    what: str,
    argument: str,
    given: Sequence[Tensor] | None,
    found: Sequence[Tensor | TensorMeta],
) -> None:
    """Refuse examples that are not as the tensors are.

    Raises:
        StageShapeError: shows both.
    """
    if given is None or _listed(given) == _listed(found):
        return
    source = "what comes in is" if what == "input" else "the module returns"
    raise StageShapeError(
        f"{owner}: {argument} says {_listed(given)}, but {source} {_listed(found)}. "
        f"Leave {argument} out, as shapes are agreed on before the first microbatch, or let "
        "neighbouring stages fit each other"
    )


def _listed(tensors: Sequence[Tensor | TensorMeta]) -> str:
    return described(tensors).replace(" without gradient", "") or "nothing"


def refused_capture(
    owner: str,
    stage_index: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    error: CaptureError,
) -> Exception:
    """What to raise where a stage's module cannot be captured.

    Args:
        owner: the stage.
        stage_index: its place.
        module: its.
        args: positional inputs.
        kwargs: keyword inputs.
        leaves: all of them.
        error: that of the capture.

    Raises:
        PipelineError: there are others than the forward takes.

    Returns:
        The forward's own exception where it raises one; a PipelineError where an operator refuses
        its inputs; a CaptureError where they do not make one graph.
    """
    refuse_unfit_call(owner, module, args, kwargs, first=stage_index == 0)
    failing = isinstance(error, FailingCallError)
    own = error_of_call(module, args, kwargs) if failing or is_raised_by_forward(error) else None
    if own is not None and not failing:
        own.add_note(f"raised by the forward of {owner}, as its graph was captured")
        return own
    made: Exception
    if failing:
        why = str(error) if own is None else f"{type(own).__name__}: {own} {line_of(own)}".rstrip()
        tensors = _listed([each for each in leaves if isinstance(each, Tensor)])
        source, advice = (
            f"stage {stage_index - 1} hands on",
            "Let the one return what the other takes",
        )
        if not stage_index:
            source, advice = "step() was given", "Give it what the module's forward takes"
        made = PipelineError(
            f"{owner} cannot be called with what {source}, {tensors}"
            f"{', keyword arguments last' if kwargs else ''}: {why.rstrip('.')}. {advice}"
        )
    else:
        made = CaptureError(
            f"{owner} must be one graph: {error}\nOr keep torch's PipelineStage "
            "around module = autosplit.split(submodule), which may have graph breaks, with "
            "dw_builder=autosplit.pipelining.dw_builder(module)",
            because=error.because,
        )
    made.__cause__ = error if own is None else own
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


def line_of(error: BaseException) -> str:
    """``(at file:line)`` of the innermost frame that is the user's, where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_ours(frame.filename)]
    return f"(at {own[-1].filename}:{own[-1].lineno})" if own else ""


def _is_ours(file: str) -> bool:
    root = __file__.rpartition("pipelining")[0]
    return file.startswith((root, "<")) or is_torch_file(file)
