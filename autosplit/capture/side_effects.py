"""Find the side effects of a forward on Python objects. They are refused, or turned into guards.

Dynamo records the objects that a forward writes to, and the values that it leaves in them. These
include changes that the forward undoes before it returns (as ``with`` blocks do), attributes that
are set to the value they have, and buffers written in place, whose update is in the graph.

Random numbers of Python's ``random`` are refused, because a graph would repeat them.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import re
from collections.abc import Collection, Iterator, Sequence
from traceback import FrameSummary
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import CaptureOutput, get_traced_fn
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import RandomValueSource
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._guards import TracingContext

from autosplit.capture.diagnosis import forward_of, user_frame
from autosplit.errors import CaptureError, PythonStateError, with_code
from autosplit.passes.graph import placeholders
from autosplit.torch_internals.dynamo import source_name, traced_value
from autosplit.torch_internals.patches import patched

_ASSIGNMENT = "self.mean = x.mean()"
_BUFFER_WRITE = (
    'self.register_buffer("mean", torch.zeros(()))  # in __init__\n'
    "self.mean.copy_(x.mean().detach())  # in forward"
)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
_MISSING, _UNKNOWN = object(), object()
_VARIABLE = re.compile(r"\b[LG]\[")  # may be inside, as in type(L['self'])


class Setter(NamedTuple):
    """An attribute, or an entry of a dictionary, that the forward sets to the value it already has.
    The graph is valid only while the attribute or entry has this value.

    Attributes:
        target: the object or dictionary.
        key: name of the attribute, or key of the entry.
        value: the value that the forward sets.
    """

    target: Any
    key: Any
    value: Any

    def holds(self) -> bool:
        """Whether the attribute or entry still has the value."""
        return _same(self.value, _current_value(self.target, self.key))


class Written(NamedTuple):
    """An object that a forward writes to.

    Attributes:
        source: Python expression by which the forward reached the object.
        left: maps an attribute, or a key of a dictionary, to Dynamo's variable for the value that
            the forward leaves there; None for writes of another kind.
        frame: frame of the user's code that writes; None if Dynamo has none.
    """

    source: str
    left: dict[Any, Any] | None
    frame: FrameSummary | None


@contextlib.contextmanager
def record_writes() -> Iterator[list[Written]]:
    """Context that yields a list. A forward that is traced inside the context fills the list with
    the objects to which it writes.
    """
    written: list[Written] = []
    original: Any = SideEffects._get_modified_vars
    kinds = AttributeMutationExisting, ValueMutationExisting
    stacks: dict[Any, Sequence[FrameSummary]] = {}

    def note_stack(_: Any, variable: Any) -> None:
        if isinstance(variable.mutation_type, kinds):
            stacks[variable] = TracingContext.extract_stack()

    def modified(effects: Any) -> Any:
        variables = original(effects)
        old = [variable for variable in variables if isinstance(variable.mutation_type, kinds)]
        written[:] = [
            Written(source_name(v.source), _left(effects, v), user_frame(stacks.get(v, ())))
            for v in old
        ]
        return variables

    with (
        patched(SideEffects, "_get_modified_vars", modified),
        patched(SideEffects, "_capture_user_stack", note_stack),
    ):
        yield written


def _left(effects: Any, variable: Any) -> dict[Any, Any] | None:
    if isinstance(variable.mutation_type, AttributeMutationExisting):
        return dict(effects.store_attr_mutations.get(variable, {})) or None
    try:
        if variable.python_type() is not dict:
            return None
        return {key.vt.as_python_constant(): value for key, value in variable.items.items()}
    except NotImplementedError:  # a key is not constant, or Dynamo does not know the object's class
        return None


def setters(
    module: nn.Module,
    captured: CaptureOutput,
    written: list[Written],
    scope: dict[str, Any],
    returned: Collection[tuple[str, str]] = (),
) -> list[Setter]:
    """Find the writes by which a forward sets attributes and entries to the value they already
    have. Refuse all other writes.

    Args:
        module: the captured module.
        captured: Dynamo's output for the captured call.
        written: objects that existed before the call and are written to.
        scope: variables of the forward.
        returned: (expression of the object, attribute) of each tensor that the forward sets and the
            graph returns.

    Raises:
        PythonStateError: a call changes Python state.
        CaptureError: the forward replaces a buffer by a new tensor, which would be lost.
    """
    parameters = inspect.signature(get_traced_fn(module)[0], follow_wrapped=False).parameters
    # The dictionary of **kwargs exists for the call only.
    keyword_dicts = {f"L['{n}']" for n, p in parameters.items() if p.kind is p.VAR_KEYWORD}
    backend_input = captured.backend_input
    graph_inputs = [] if backend_input is None else placeholders(backend_input.graph_module.graph)
    traced = {
        id(traced_value(n)): n._dynamo_source for n in graph_inputs if hasattr(n, "_dynamo_source")
    }
    lasting, unchanged = dict[str, FrameSummary | None](), list[Setter]()
    for source, left, frame in written:
        if not _VARIABLE.search(source) or source in keyword_dicts:
            continue
        target = _evaluated(source, scope)
        if _is_context(target):
            continue
        if (
            not left
            or target is _UNKNOWN
            or (isinstance(target, dict) and target.keys() != left.keys())
        ):
            lasting[source] = frame
            continue
        for key, value in left.items():
            place = f"{source}[{key!r}]" if isinstance(target, dict) else f"{source}.{key}"
            name, current = _name_of(value, traced), _current_value(target, key)
            if name == place or (source, key) in returned:
                continue
            if _same(_value_of(value, name, scope), current):
                unchanged.append(Setter(target, key, current))
            else:
                if source.endswith("._buffers") and current is not None:
                    raise CaptureError(
                        f"{forward_of(module)} replaces buffer {key!r} by a new tensor; write into "
                        "the buffer instead, as in self.buffer.copy_(new) or self.buffer += 1"
                    )
                lasting[place] = frame
    if lasting:
        at = next(filter(None, lasting.values()), None)
        writer = f"{at.name} (at {at.filename}:{at.lineno})" if at else forward_of(module)
        message = (
            f"{writer} changes Python state, "
            f"{', '.join(dict.fromkeys(map(_readable, lasting)))}, which a graph cannot repeat on "
            "every call. Write a statistic into a buffer in place (self.buffer.copy_(x.detach()); "
            "a loss can be an nn.Module with buffers). Name a loss that is to be trained in "
            "StageOptions(aux_losses=...) of a trainer. Or return the tensor "
            '(a trainer\'s loss_fn may return (loss, {"name": scalar})), or keep the state '
            "outside of the forward. If only the first call changes it, call the model once "
            "before you split it."
        )
        raise PythonStateError(
            with_code(message, wrong=_ASSIGNMENT, right=_BUFFER_WRITE), because=message
        )
    return unchanged


def _name_of(value: Any, traced: dict[int, Any]) -> str:
    """Dynamo's source expression of a value; empty if the forward computed the value. The result of
    an in-place operator has the source of the tensor that it wrote into.
    """
    source = value.source
    if source is None and type(value) is TensorVariable:
        source = traced.get(id(traced_value(value.as_proxy().node)))
    return source_name(source)


def _value_of(value: Any, name: str, scope: dict[str, Any]) -> Any:
    """The Python value of a variable of Dynamo. ``_UNKNOWN`` if the variable is neither a constant
    nor has a source expression that Python can evaluate.
    """
    if name:
        return _evaluated(name, scope)
    try:
        return value.as_python_constant()
    except Exception:
        return _UNKNOWN


def _evaluated(source: str, scope: dict[str, Any]) -> Any:
    try:
        return eval(source, scope)
    except Exception:  # some of Dynamo's names cannot be evaluated in Python
        return _UNKNOWN


def _current_value(target: Any, key: Any) -> Any:
    if isinstance(target, dict):
        return target.get(key, _MISSING)
    return getattr(target, key, _MISSING)


def _readable(source: str) -> str:
    """A source expression of Dynamo for readers: ``self.a.n`` for ``L['self']._modules['a'].n``. A
    global of another module keeps its name.
    """
    text = re.sub(r"\._(?:modules|buffers)\['([^']*)'\]", r".\1", source)
    text = re.sub(r"\bG\['__import_([^']*)'\]", lambda m: m[1].replace("_dot_", "."), text)
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", text)


def _is_context(value: object) -> bool:
    """Whether the object has the methods of a ``ContextVar``, which a call sets and resets."""
    return all(callable(getattr(value, name, None)) for name in ("get", "set", "reset"))


def _same(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, _PLAIN) and bool(a == b)


def refuse_drawn(module: nn.Module, exported: fx.GraphModule) -> None:
    """Refuse a graph with a number drawn from Python's ``random``: the number would never change.

    Raises:
        CaptureError: the graph contains such a number.
    """
    sources = (getattr(node, "_dynamo_source", None) for node in exported.graph.nodes)
    if any(isinstance(source, RandomValueSource) for source in sources):
        raise CaptureError(
            f"{forward_of(module)} draws from Python's random module, which a graph cannot "
            "repeat; draw with torch.rand instead"
        )


def refuse_own_generators(module: nn.Module) -> None:
    """Refuse modules that have a ``random.Random``, because Dynamo records its numbers as constants
    (seen with torch 2.13).

    Raises:
        CaptureError: a submodule has such a generator.
    """
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, random.Random):
                path = f"{name}.{key}" if name else key
                raise CaptureError(
                    f"{type(module).__name__} keeps a random.Random as {path!r}, whose numbers "
                    "torch.compile would repeat; draw with torch.rand or the random module"
                )
