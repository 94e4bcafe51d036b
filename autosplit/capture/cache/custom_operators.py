"""Custom operators in the cache's key: how tracing goes through one is Python code of others'.

The code is in the key where all of it can be read: functions without closures that use torch, plain
constants, each other, and further operators of this kind. The operator's kernel does not matter: it
is run, not traced.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from .argument_text import NoFingerprintError, argument_text, target_name
from .kernel_overrides import DEVICES

_KERNELS = {"Autograd", "ADInplaceOrView", "BackendSelect", "CompositeExplicitAutograd", "Meta"}
"""Dispatch keys that ``torch.library.custom_op`` itself registers for; each can be once."""
_ANYTHING = {"eval", "exec", "globals", "locals", "vars", "open", "__import__", "input"}
_TORCHS = ("aten", "prims")


def definition_text(operator: Any) -> str:
    """All that tracing may take from the definition of a custom operator.

    Raises:
        NoFingerprintError: some of it is out of sight.
    """
    return "\n".join(_Definitions().lines(operator.name().partition(".")[0]))


class _Definitions:
    """Reads definitions and the functions that they use, each once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, Any]] = {}

    def lines(self, name: str) -> Iterator[str]:
        """Lines of the operator of a name."""
        found: Any = OPDEFS.get(name)
        if found is None:
            raise NoFingerprintError(f"{name} is a custom operator that is not made in Python")
        if not self._is_new(found, name):
            return
        others = _kernels(name) - _KERNELS - DEVICES
        if others or found._torch_dispatch_fns or _casts(found):
            raise NoFingerprintError(f"{name} is a custom operator with kernels besides its own")
        yield f"operator {name} {found._schema} {sorted(map(str, found._tags))}"
        for function in (found._abstract_fn, found._setup_context_fn, found._backward_fn):
            yield from self._function(function)

    def _is_new(self, value: Any, text: str) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = text, value
        return True

    def _function(self, function: Any) -> Iterator[str]:
        if function is None:
            yield "none"
            return
        if isinstance(function, types.BuiltinFunctionType):
            yield target_name(function)
            return
        if not isinstance(function, types.FunctionType) or function.__closure__:
            raise NoFingerprintError(f"{function!r} of a custom operator is no plain function")
        where = f"{function.__module__}.{function.__qualname__}"
        yield f"function {where}"
        if not self._is_new(function, where):
            return
        yield argument_text((function.__defaults__, function.__kwdefaults__))
        names: set[str] = set()
        for code in _codes(function.__code__):
            yield from _code_lines(code, where)
            names.update(code.co_names)
        for name in sorted(names & function.__globals__.keys()):
            yield from self._value(name, function.__globals__[name], where)
        if forbidden := names & _ANYTHING - function.__globals__.keys():
            raise NoFingerprintError(f"{where} calls {', '.join(sorted(forbidden))}")
        if "ops" in names:
            yield from self._called(names, where)

    def _value(self, name: str, value: Any, where: str) -> Iterator[str]:
        """What a function reads under a global name."""
        if isinstance(value, types.FunctionType) and not _is_torchs(value.__module__):
            yield f"{name}:"
            yield from self._function(value)
        elif isinstance(value, types.ModuleType) and _is_torchs(value.__name__):
            yield f"{name}: module {value.__name__}"
        elif _is_torchs(getattr(value, "__module__", None)) and hasattr(value, "__qualname__"):
            yield f"{name}: {value.__module__}.{value.__qualname__}"
        else:
            try:
                yield f"{name}: {argument_text(value)}"
            except NoFingerprintError:
                raise NoFingerprintError(f"{where} reads {name}, which may be anything") from None

    def _called(self, names: set[str], where: str) -> Iterator[str]:
        """Other operators that a function reaches through ``torch.ops``."""
        called = [name for name in sorted(OPDEFS) if set(name.split("::")) <= names]
        if not called and names.isdisjoint(_TORCHS):
            raise NoFingerprintError(f"{where} calls an operator that is not made in Python")
        for name in called:
            yield from self.lines(name)


def _kernels(operator: str) -> set[str]:
    """Dispatch keys that somebody registered kernels of an operator for."""
    space, _, name = operator.partition("::")
    split: Sequence[list[str]] = [each.split("/") for each in torch.library._impls.copy()]
    return {key for where, what, key in split if (where, what.partition(".")[0]) == (space, name)}


def _casts(operator: Any) -> bool:
    """Whether an operator casts its inputs under autocast: it keeps dtypes, by device in one
    dictionary or, on torch 2.11, each in a field.
    """
    kept = [value for name, value in vars(operator).items() if name.startswith("_autocast_")]
    return not kept or any(kept)  # where none is kept it is out of sight


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _code_lines(code: types.CodeType, where: str) -> Iterator[str]:
    if any(each.opname == "IMPORT_NAME" for each in dis.get_instructions(code)):
        raise NoFingerprintError(f"{where} imports")
    constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
    yield f"{code.co_name} {code.co_code.hex()} {code.co_exceptiontable.hex()}"
    yield f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    yield " ".join(map(_constant_text, constants))


def _constant_text(value: Any) -> str:
    if isinstance(value, frozenset):  # ``x in {1, 2}``
        return "frozenset " + " ".join(sorted(map(argument_text, value)))
    return argument_text(value)


def _is_torchs(module: str | None) -> bool:
    """Whether versions that are in the key say what a module holds."""
    root = (module or "").partition(".")[0]
    return root in {"torch", "math", "operator", "_operator", "typing", builtins.__name__}
