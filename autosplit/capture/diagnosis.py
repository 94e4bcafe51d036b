"""Turn errors of tracing into a ``CaptureError`` with the user's line and advice; find hooks that
graphs cannot contain.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
from collections.abc import Iterator, Sequence
from traceback import FrameSummary
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch.nn.modules import module as torch_module

from autosplit.errors import CaptureError, FailingCallError, PythonStateError, with_code
from autosplit.torch_internals.dynamo import is_standard_library

_LIBRARIES = tuple(
    os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__))
)


class ModuleHook(NamedTuple):
    """A hook on a module.

    Attributes:
        owner: name of the submodule that has the hook; empty for the module itself, None for a
            hook on all modules.
        kind: the submodule's class name.
        function: the hook.
    """

    owner: str | None
    kind: str
    function: Any

    @property
    def line(self) -> str:
        """``file:line`` of the hook's definition, or an empty string."""
        function = inspect.unwrap(getattr(self.function, "func", self.function))
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            function = type(function).__call__ if callable(function) else function
        code = getattr(function, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else ""

    def __str__(self) -> str:
        if self.owner is None:
            return "every module (torch.nn.modules.module)"
        return f"{self.owner} ({self.kind})" if self.owner else self.kind


def backward_hook(module: nn.Module) -> ModuleHook | None:
    """The first hook on the backward of a module or of all modules; None without one. Graphs cannot
    contain such hooks.
    """
    everywhere = (
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )
    for table in everywhere:
        for hook in table.values():
            return ModuleHook(None, "", hook)
    return next(_hooks(module, "_backward_hooks", "_backward_pre_hooks"), None)


def forward_hook(module: nn.Module) -> ModuleHook | None:
    """The first forward hook on a module or its submodules that is defined outside of torch and
    autosplit; None without one.
    """
    hooks = _hooks(module, "_forward_hooks", "_forward_pre_hooks")
    return next((hook for hook in hooks if hook.line and not is_library_file(hook.line)), None)


def is_library_file(path: str) -> bool:
    """Whether a file belongs to torch or to autosplit."""
    return path.startswith(_LIBRARIES)


class Wrapper(nn.Module):
    """A module of autosplit that wraps the user's module."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def named_module(module: nn.Module) -> nn.Module:
    """The user's module inside any ``Wrapper``; errors name it."""
    return named_module(module.module) if isinstance(module, Wrapper) else module


def _hooks(module: nn.Module, *tables: str) -> Iterator[ModuleHook]:
    for name, part in module.named_modules():
        for table in tables:
            for hook in getattr(part, table, {}).values():
                yield ModuleHook(name, type(part).__name__, hook)


@contextlib.contextmanager
def user_errors(module: nn.Module) -> Iterator[None]:
    """Turn errors of tracing into a CaptureError that names the user's line.

    Raises:
        FailingCallError: an operator refused its inputs.
        PythonStateError: tracing failed in a constructor or at a lock.
        CaptureError: tracing failed for another reason.
    """
    try:
        with log_errors_once():
            yield
    except CaptureError:
        raise
    except Exception as error:
        module = named_module(module)
        hook = backward_hook(module)
        if hook is not None and _is_calling(error):
            raise _hooked(module, hook) from error
        line = _user_line(error) or definition(module)
        kind = CaptureError
        if isinstance(error, TorchRuntimeError):
            kind = FailingCallError
        elif "`lock` context manager" in str(error) or any(
            frame.name == "__init__" for frame in getattr(error, "real_stack", None) or ()
        ):
            kind = PythonStateError
        failure = _failure(str(error))
        action = "run on these inputs" if failure else "be captured in one graph"
        reason, advice = failure or _reason(error), _advice(module, line, error)
        message = (
            f"{type(module).__name__} cannot {action}.\n  at {line}\n  because {reason}\n  {advice}"
        )
        if "ata-dependent branching" in reason:
            message = with_code(message, wrong=_BRANCH, right=_SELECTION)
        raise kind(
            message,
            because=f"{reason.partition(chr(10))[0].rstrip('.')} (at {line}). {advice}",
        ) from error


def _is_calling(error: Exception) -> bool:
    """Whether ``Module.__call__`` or a hook, rather than a forward, raised the error."""
    stack: list[Any] = [*(getattr(error, "real_stack", None) or ())]
    return bool(stack) and stack[-1].filename == torch.nn.modules.module.__file__


def _hooked(module: nn.Module, hook: ModuleHook) -> CaptureError:
    """The error for a module that has a backward hook."""
    at = f" (at {hook.line})" if hook.line else ""
    reason = f"{hook} has a backward hook{at}, which a graph cannot contain"
    advice = "Split the submodules that have no such hooks instead of the whole module"
    if not hook.owner:
        advice = "Put it on the split module instead"
    advice += (
        ". In a pipeline stage, hook its parameters, or tensors in its forward "
        "(y.register_hook(lambda grad: 2 * grad))"
    )
    return CaptureError(
        f"{type(module).__name__} cannot be captured in one graph: {reason}. {advice}.",
        because=f"{reason}. {advice}",
    )


@contextlib.contextmanager
def log_errors_once() -> Iterator[None]:
    """Context that silences the log of fake tensors. Fake tensors log an operator's error with its
    traceback and then raise the same error.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_below_error)
    try:
        yield
    finally:
        log.removeFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _user_line(error: Exception) -> str:
    """``file:line`` of the innermost frame of the user's code; empty if none is recorded."""
    frame = user_frame(getattr(error, "real_stack", None) or ())
    if frame is not None:
        return f"{frame.filename}:{frame.lineno}"
    lines = re.findall(r'File "(.+?)", line (\d+)', str(error).partition("Original traceback:")[2])
    return ":".join(next((line for line in lines[::-1] if not is_library_file(line[0])), ()))


def user_frame(stack: Sequence[FrameSummary]) -> FrameSummary | None:
    """The innermost frame of the user's code, in which a function of Python's library may have been
    called; without one, the innermost frame of one of torch's modules.
    """
    frames = [
        frame
        for frame in stack
        if not (is_library_file(frame.filename) or is_standard_library(frame.filename))
    ]
    layers = [frame for frame in stack if f"nn{os.sep}modules" in frame.filename]
    return next(reversed(frames or layers), None)


_BRANCH = "if x.sum() > 0:\n    x = 2 * x"
_SELECTION = "x = torch.where(x.sum() > 0, 2 * x, x)"

_FAILURES = {
    r"fake tensors: call_\w+ (?:<(?:built-in )?(?:function|method) )?([\w.]+)"
    r".*: got \w+\(([\"'])(.*)\2\)$": r"\1 fails: \3",
    r"raised exception (\w+)\(\[?([\"'])(.*)\2\]?\)": r"it raises \1: \3",
}


def _failure(text: str) -> str:
    """The part of Dynamo's error text in which an operator or a module refuses its inputs; empty
    for other errors.
    """
    for pattern, message in _FAILURES.items():
        if match := re.search(pattern, text, re.MULTILINE):
            return match.expand(message)
    return ""


def _advice(module: nn.Module, line: str, error: Exception) -> str:
    if any(_loops_over_experts(part, line) for part in module.modules()):
        return (
            "Set experts_implementation='grouped_mm' in the model's configuration, so that the "
            "experts are one operator instead of a loop over the experts that have tokens."
        )
    if isinstance(error, TorchRuntimeError) or _failure(str(error)):
        return (
            "Pass inputs of sizes and dtypes that the module accepts. If it runs on these inputs "
            "without autosplit, torch cannot trace it: such a call runs unsplit, unless one graph "
            "is required (a stage, fullgraph=True)."
        )
    if "share storage" in str(error) or "view input mutations" in str(error):
        return (
            "The module writes into an input that shares memory with another input. Pass a clone, "
            "or pass the same tensor as both."
        )
    text = str(error)
    if "FunctionalTensor" in text or "a functional tensor" in text or text.startswith("tensor("):
        return (
            "The forward reads an attribute of a parameter, or writes into a tensor that is not a "
            "buffer. Register that tensor with register_buffer(name, tensor, persistent=False), "
            "and read it from the module (a loss that is an nn.Module may have buffers)."
        )
    if "saved_tensors_hooks" in str(error) or "save_on_cpu" in str(error):
        return (
            "Put these hooks around the call of the split module, or split the submodule that is "
            "called under them instead of this one."
        )
    return (
        "Rewrite that line without Python that depends on tensor values or changes objects outside "
        "of the forward, or split the parts of the model before and after it separately."
    )


def _loops_over_experts(part: nn.Module, line: str) -> bool:
    """Whether a line belongs to experts of transformers that are configured to run in a Python
    loop.
    """
    implementation = getattr(getattr(part, "config", None), "_experts_implementation", None)
    experts = type(part).__name__.endswith("Experts") and implementation == "eager"
    return experts and definition(part).rpartition(":")[0] == line.rpartition(":")[0]


def forward_of(module: nn.Module) -> str:
    """The name of the module's forward, and its ``file:line``."""
    module = named_module(module)
    return f"{type(module).__name__}.forward (at {definition(module)})"


def definition(module: nn.Module) -> str:
    """``file:line`` of the user's code that the module's forward runs."""
    forward = inspect.unwrap(type(module).forward)
    try:
        file = inspect.getsourcefile(forward) or ""
        hook = forward_hook(module) if is_library_file(file) else None
        if hook is not None:
            return f"a hook of {hook}, {hook.line}"
        return f"{file}:{inspect.getsourcelines(forward)[1]}"
    except (OSError, TypeError):
        return f"{type(module).__module__}.{type(module).__qualname__}.forward"


def _reason(error: Exception) -> str:
    text = re.split("from user code:|Original traceback:", str(error))[0].strip()
    if "mutating a non-functional tensor" in text:
        return "it writes into a tensor that is no input, parameter or buffer"
    kept = [
        line.strip()
        for line in text.splitlines()
        if line.strip()
        and line.strip() not in {"Explanation:", "Developer debug context:"}
        and not line.lstrip().startswith(("Hint:", "For more details", "Set TORCH"))
    ]
    prefix = "" if isinstance(error, TorchDynamoException) else f"{type(error).__name__}: "
    return prefix + "\n    ".join(kept[:6])
