"""Side effects of a forward on Python objects: refused, or turned into guards.

Dynamo names the objects that a forward writes to, but in the same words for what lasts, for
what is put back before the call ends (as ``with`` blocks do), for attributes that are set to the
value they have, and for buffers written in place, which the graph does carry. So the forward
runs once on a copy without data, and what it left behind is compared with what was there.

Random numbers of Python's ``random``, which a graph would repeat, are refused.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import warnings
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import get_traced_fn
from torch._dynamo.source import RandomValueSource
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from autosplit.errors import CaptureError
from autosplit.torch_internals.pytree import tree_flatten, tree_unflatten

from .diagnosis import PythonStateError, definition, told_once

_SOURCE = re.compile(r"\"([LG]\['[^\"]*)\"")
_SIGN = "side effects"  # in a warning of Dynamo's that names the objects that are written to
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
_COMPARED = (nn.Module, list, set, dict)
# Kept by identity, entry by entry; buffers have a comparison of their own.
_TABLES = ("_parameters", "_modules")
_MARK = "composable_api_state"  # in names of attributes under which fully_shard keeps its state

Contents = dict[Any, Any]


class Setter(NamedTuple):
    """An object that the forward sets to the value it has.

    Attributes:
        target: a submodule, or a container that one has.
        contents: its attributes or elements. A graph stands for the forward only while they
            are these: after it the forward would leave these behind.
    """

    target: Any
    contents: Contents

    def holds(self) -> bool:
        return _unchanged(self.contents, _contents(self.target))


def setters(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caught: list[warnings.WarningMessage],
    names: dict[str, Any],
) -> list[Setter]:
    """Examine the side effects that Dynamo warned of.

    Args:
        module: captured.
        args: that it was captured for.
        kwargs: that it was captured for.
        caught: warnings of the capture.
        names: globals of the forward.

    Raises:
        PythonStateError: one more call would leave something else behind.
        CaptureError: the forward replaces a buffer by a new tensor; it would be lost.
    """
    found = []
    for warning in caught:
        if _SIGN in str(warning.message):
            found += _SOURCE.findall(str(warning.message))
    return _WrittenObjects(module, found, names).judge(args, kwargs) if found else []


def pass_on(caught: list[warnings.WarningMessage]) -> None:
    """Warn of what was caught, but for what Dynamo says of side effects."""
    for warning in caught:
        if _SIGN not in str(warning.message):
            place = warning.filename, warning.lineno
            warnings.warn_explicit(warning.message, warning.category, *place)


def error_of_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """What the forward raises for such inputs, with its traceback. Tried on a copy without data;
    None where that raises nothing, asks for values, or has no copies.
    """
    try:
        twin, mode = _without_data(module)
    except Exception:
        return None
    try:
        with told_once():
            _run(twin, args, kwargs, mode)
    except DataDependentOutputException:
        return None
    except Exception as error:
        return error
    return None


class _WrittenObjects:
    """The objects that a forward writes to, by the names that Dynamo has for them."""

    def __init__(self, module: nn.Module, sources: list[str], names: dict[str, Any]) -> None:
        self.module = module
        function, root = get_traced_fn(module)
        parameters = inspect.signature(function, follow_wrapped=False).parameters
        # The dictionary behind **kwargs is made for the call and gone after it.
        own = {f"L['{n}']" for n, p in parameters.items() if p.kind is p.VAR_KEYWORD}
        kept = [source for source in sources if source not in own]
        self._me = next(iter(parameters), "") if root is module else ""
        objects = {s: eval(s, {"G": names}) for s in kept if s.startswith("G[")}
        self._globals = {s: value for s, value in objects.items() if not _is_context(value)}
        local = [s for s in kept if s.startswith("L[")]
        self._buffers = [s for s in local if "._buffers" in s]
        local = [s for s in local if s not in self._buffers]
        self._below = [s for s in local if isinstance(self._find(s, module), _COMPARED)]
        self._others = [s for s in local if s not in self._below]

    def judge(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Setter]:
        lasting = self._others
        if not lasting and (self._globals or self._buffers or self._below):
            lasting = self._left_behind(args, kwargs)
        if lasting:
            raise PythonStateError(
                f"{type(self.module).__name__}.forward (at {definition(self.module)}) changes "
                f"Python state, {', '.join(map(_readable, lasting))}, which a graph cannot repeat "
                "on every call. Keep such state outside of the forward, or in a buffer that is "
                "written in place. If only the first call does it, call the model once before it "
                "is split."
            )
        written = [self._find(each, self.module) for each in self._below]
        return [Setter(each, _contents(each)) for each in written]

    def _find(self, source: str, root: nn.Module) -> Any:
        """The object below the module, or below a copy of it; None for one elsewhere."""
        if not self._me or not source.startswith(f"L['{self._me}']"):
            return None
        return eval(source, {"L": {self._me: root}})

    def _left_behind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The objects that a call leaves changed. Globals are restored; containers among them
        cannot be and are not risked, nor are objects that a copy of the module shares with it.
        """
        outside = {s: vars(v) for s, v in self._globals.items() if hasattr(v, "__dict__")}
        containers = [source for source in self._globals if source not in outside]
        if containers:
            return containers
        earlier = {source: dict(space) for source, space in outside.items()}
        try:
            twin, mode = _without_data(self.module)
        except Exception:  # there are no copies of this one
            return [*outside, *self._below, *self._buffers]
        written = {source: self._find(source, twin) for source in self._below}
        common = [s for s, each in written.items() if each is self._find(s, self.module)]
        if common:
            return common
        before = {s: _contents(each) for s, each in written.items()}
        buffers = dict(twin.named_buffers())
        _run(twin, args, kwargs, mode)
        changed = [source for source, space in outside.items() if space != earlier[source]]
        for source in changed:
            outside[source].clear()
            outside[source].update(earlier[source])
        self._refuse_replaced(buffers, dict(twin.named_buffers()))
        after = {s: _contents(each) for s, each in written.items()}
        changed += [source for source in written if not _unchanged(before[source], after[source])]
        return changed

    def _refuse_replaced(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        replaced = [name for name, tensor in after.items() if before.get(name) is not tensor]
        if replaced:
            raise CaptureError(
                f"{type(self.module).__name__}.forward replaces buffer {replaced[0]!r} by a new "
                f"tensor (at {definition(self.module)}); write into it instead, as in "
                "self.buffer.copy_(new) or self.buffer += 1"
            )


def _readable(source: str) -> str:
    """``L['self']._modules['a'].n`` -> ``self.a.n``; a global of another module keeps its name."""
    text = re.sub(r"\._(?:modules|buffers)\['([^']*)'\]", r".\1", source)
    text = re.sub(r"^G\['__import_([^']*)'\]", lambda m: m[1].replace("_dot_", "."), text)
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", text)


def _is_context(value: object) -> bool:
    """Whether the object is a ``ContextVar`` or alike: set and reset within the call."""
    return all(callable(getattr(value, name, None)) for name in ("get", "set", "reset"))


def _without_data(module: nn.Module) -> tuple[nn.Module, FakeTensorMode]:
    """A copy with fake parameters, buffers and attributes, and their fake mode."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    kept = tree_flatten([[*vars(part).values()] for part in module.modules()])[0]
    state = [*module.parameters(), *module.buffers(), *filter(torch.is_tensor, kept)]
    memo: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in state}
    for part in module.modules():  # FSDP's state has process groups, of which there are no copies
        memo |= {id(value): value for name, value in vars(part).items() if _MARK in name}
    return copy.deepcopy(module, memo), mode


def _run(twin: nn.Module, args: Any, kwargs: Any, mode: FakeTensorMode) -> None:
    leaves, spec = tree_flatten((args, kwargs))
    fakes = [mode.from_tensor(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
    fake_args, fake_kwargs = tree_unflatten(fakes, spec)
    with mode:  # with gradients, if so: blocks may be there that were captured for such calls
        twin(*fake_args, **fake_kwargs)


def _contents(target: Any) -> Contents:
    if isinstance(target, (list, set)):
        return dict(enumerate(target)) if isinstance(target, list) else dict.fromkeys(target)
    if isinstance(target, dict):
        return dict(target)
    own = vars(target)
    omitted = {*_TABLES, "_buffers"}
    found = {name: value for name, value in own.items() if name not in omitted}
    for table in _TABLES:
        found |= {(table, name): value for name, value in own[table].items()}
    return found


def _unchanged(before: Contents, after: Contents) -> bool:
    return before.keys() == after.keys() and all(
        _same(value, after[name]) for name, value in before.items()
    )


def _same(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, _PLAIN) and bool(a == b)


def refuse_drawn(module: nn.Module, exported: fx.GraphModule) -> None:
    """Refuse a graph that holds a number drawn from Python's ``random``: it would never change.

    Raises:
        CaptureError: there is such a number in the graph.
    """
    sources = (getattr(node, "_dynamo_source", None) for node in exported.graph.nodes)
    if any(isinstance(source, RandomValueSource) for source in sources):
        raise CaptureError(
            f"{type(module).__name__}.forward (at {definition(module)}) draws from Python's "
            "random module, which a graph cannot repeat; draw with torch.rand instead"
        )


def refuse_own_generators(module: nn.Module) -> None:
    """Refuse modules with a ``random.Random``, whose numbers Dynamo takes for constants (seen with
    torch 2.13).

    Raises:
        CaptureError: a submodule has such a generator.
    """
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, random.Random):
                where = f"{name}.{key}" if name else key
                raise CaptureError(
                    f"{type(module).__name__} keeps a random.Random as {where!r}, whose numbers "
                    "torch.compile would repeat; draw with torch.rand or the random module"
                )
