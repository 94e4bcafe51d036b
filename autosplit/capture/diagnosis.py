"""What tracing raised -> a CaptureError that names the user's line and says what to do."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator

from torch import nn
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from autosplit.errors import CaptureError, FailingCallError


class ConstructionError(CaptureError):
    """What cannot be in a graph is the making of an object, such as a module: as a rule a
    forward makes those on its first call only.
    """


@contextlib.contextmanager
def user_errors(module: nn.Module) -> Iterator[None]:
    """Turn what tracing raises into a CaptureError that names the user's line.

    Raises:
        FailingCallError: an operator refused its inputs.
        ConstructionError: it was in a constructor.
        CaptureError: anything else.
    """
    try:
        with told_once():
            yield
    except CaptureError:
        raise
    except Exception as error:
        where = _user_line(error) or definition(module)
        kind = CaptureError
        if isinstance(error, TorchRuntimeError):
            kind = FailingCallError
        elif any(frame.name == "__init__" for frame in getattr(error, "real_stack", None) or ()):
            kind = ConstructionError
        raise kind(
            f"{type(module).__name__} cannot be captured in one graph.\n"
            f"  at {where}\n  because {_reason(error)}\n  {_advice(error)}"
        ) from error


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Fake tensors log an operator's error with its whole traceback, and then raise it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_below_error)
    try:
        yield
    finally:
        log.removeFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _user_line(error: Exception) -> str:
    """``file:line`` of the innermost frame of the user's code, where Dynamo recorded it."""
    stack = getattr(error, "real_stack", None)
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""


def _advice(error: Exception) -> str:
    if isinstance(error, TorchRuntimeError):
        return "Run the model on these inputs without autosplit: the same operator should fail."
    if "share storage" in str(error):
        return (
            "The module writes into an input that shares its memory with another one; pass a "
            "clone, or one and the same tensor as both."
        )
    return (
        "Write that line so that a graph can hold it (without Python that depends on tensor "
        "values), or split the parts of the model around it separately."
    )


def definition(module: nn.Module) -> str:
    forward = inspect.unwrap(type(module).forward)
    try:
        return f"{inspect.getsourcefile(forward)}:{inspect.getsourcelines(forward)[1]}"
    except (OSError, TypeError):
        return f"{type(module).__module__}.{type(module).__qualname__}.forward"


def _reason(error: Exception) -> str:
    text = str(error).partition("from user code:")[0].strip()
    kept = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith(("Hint:", "For more details", "Set TORCH"))
    ]
    prefix = "" if isinstance(error, TorchDynamoException) else f"{type(error).__name__}: "
    return prefix + "\n    ".join(kept[:6])
