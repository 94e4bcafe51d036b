"""``ObjectTexts``: texts of Python objects by which a process recognises those of another."""

from __future__ import annotations

import abc
import contextlib
import copy
import enum
import functools
import hashlib
import random
import types
import typing
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.capture.cache.argument_text import NoFingerprintError
from autosplit.passes.analysis.operators import OVERLOAD

from .code_digest import CodeDigests
from .hook_tables import HookTable, HookTables

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
_WRAPPERS = (staticmethod, classmethod)
_GENERATORS = (random.Random, torch.Generator)
# Of a class; none says what a method does.
_UNREAD = {
    "__abstractmethods__",
    "__annotate__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__dict__",
    "__doc__",
    "__slotnames__",  # left by the first copy of an object
    "__weakref__",
    "_abc_impl",
}
_STATIC = "_dynamo_static_input_type"  # a mark that Dynamo leaves on parameters
OPEN = "_dynamo_weak_dynamic_indices"  # a mark of dimensions whose sizes are to be left open
_CONSTANT = "_dynamo_marked_constant"  # a mark of torch.compiler.assume_constant_result
_HEAP_TYPE = 1 << 9  # made by a class statement: others are as their library's version has them
_DEEPEST = 8
_MOST = 500_000


class ObjectTexts:
    """Texts of objects, functions and classes by what they are made of.

    Objects are numbered as they come, so that two that are one object in one process and two in
    another have other texts.

    Attributes:
        codes: digests of the code of all functions that are in a text.
        hooks: of the modules that are in a text.
        constant: functions among them whose results tracing is told to take for constants, and
            which cannot be asked for them.
    """

    def __init__(self) -> None:
        self.codes = CodeDigests()
        self.hooks = HookTables()
        self.constant: set[str] = set()
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._storages: dict[int, int] = {}
        self._classes: dict[type, str] = {}
        self._functions: dict[int, tuple[str, Any]] = {}
        self._in_class = 0

    def counting_on(self) -> ObjectTexts:
        """The same texts, and numbers that go on from here, whatever is numbered otherwise."""
        made = copy.copy(self)
        made._numbers, made._storages = dict(self._numbers), dict(self._storages)
        return made

    def apart(self) -> ObjectTexts:
        """A copy: what it is asked for is not in these texts."""
        made = self.counting_on()
        made.codes, made.constant = copy.copy(self.codes), set(self.constant)
        made._classes, made._functions = dict(self._classes), dict(self._functions)
        return made

    def number(self, value: Any) -> int:
        """Which object it is, among those that were numbered."""
        return self._numbers.setdefault(id(value), (len(self._numbers), value))[0]

    def exact(self, value: Any, depth: int = _DEEPEST) -> str:
        """Text of a value that no other value has: constants, containers of such, and what has a
        name (functions and classes with what they are made of, modules, operators).

        Raises:
            NoFingerprintError: there is none.
        """
        kind = type(value)
        if kind in PLAIN:
            return f"{kind.__name__}:{value!r}"
        if isinstance(value, _NAMED):
            return f"{kind.__name__}:{value}"
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, enum.Enum):
            return f"{self._name(kind)}.{value.name} {self.exact(value.value, depth - 1)}"
        named = self._named(value)
        if named is not None:
            return named
        if depth <= 0:
            raise NoFingerprintError("a value is nested deeply")
        if kind in (tuple, list, range, slice):
            parts = value if kind is not slice else (value.start, value.stop, value.step)
            if kind is range:
                parts = (value.start, value.stop, value.step)
            return f"{kind.__name__}({','.join(self.exact(each, depth - 1) for each in parts)})"
        if kind in (set, frozenset):
            return f"{kind.__name__}({','.join(sorted(self.exact(e, depth - 1) for e in value))})"
        if kind is dict:
            pairs = ((self.exact(k, depth - 1), self.exact(v, depth - 1)) for k, v in value.items())
            return f"dict({','.join(f'{key}={each}' for key, each in pairs)})"
        raise NoFingerprintError(f"nothing tells one {kind.__qualname__} from another")

    def outline(self, value: Any, *, attributes: bool = True) -> str:
        """Text of an object by its class and number, a container's length, the keys of a
        dictionary: what it holds is left out, but for names of its attributes and plain values
        among them, which ``vars`` reads unguarded.

        Args:
            value: described.
            attributes: whether it is read, not only there.
        """
        kind = type(value)
        if kind in PLAIN:
            return f"{kind.__name__}:{value!r}"
        text = f"{self._class(kind)} #{self.number(value)}"
        plain = attributes and not isinstance(value, nn.Module)
        own = getattr(value, "__dict__", None) if plain else None
        if type(own) is dict and own:
            text += f" with {[(name, self._plainly(each)) for name, each in own.items()]}"
        if isinstance(value, Mapping):
            keys = dict.keys(value) if isinstance(value, dict) else list(value)
            texts = [self.hooks.key_text(value, key) or self.loosely(key) for key in keys]
            return f"{text} keys {texts}"
        if isinstance(value, (Sequence, AbstractSet)):
            return f"{text} length {len(value)}"
        return text

    def tensor(self, value: Tensor) -> str:
        """Text of all that tracing may look at but the data.

        Raises:
            NoFingerprintError: it is a tensor of a kind of its own.
        """
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            raise NoFingerprintError(f"a {type(value).__qualname__} of layout {value.layout}")
        storage = value.untyped_storage()
        own = self._storages.setdefault(storage._cdata, len(self._storages))
        facts = (
            *_layout(value),
            value.dtype,
            value.device,
            own,
            value.requires_grad,
            value.is_leaf,
            value._is_view(),
            value.is_conj(),
            value.is_neg(),
            value.is_inference(),
            value._backward_hooks is None,
            sorted(vars(value).keys() - {_STATIC}),
        )
        return f"{type(value).__name__} #{self.number(value)} {facts}"

    def everything(self, root: Any) -> list[str]:
        """Texts of a module and of all that hangs on it and its submodules, in containers too;
        classes and functions with their code. Other objects are there by their classes only, as
        they may hold what every process has otherwise (hashes, times).

        Raises:
            NoFingerprintError: something of it cannot be told from others.
        """
        lines: list[str] = []
        waiting = [root]
        while waiting:
            value = waiting.pop()
            if type(value) in PLAIN:
                lines.append(f"{type(value).__name__}:{value!r}")
            elif id(value) in self._numbers:
                lines.append(f"#{self.number(value)}")
            else:
                lines.append(self._one(value))
                self.number(value)
                waiting.extend(reversed(self._inside(value)))
            if len(lines) > _MOST:
                raise NoFingerprintError(f"more than {_MOST} values hang on the module")
        return lines

    def _one(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, HookTable):
            return f"{self._class(type(value.hooks))} hooks {self.hooks.numbers(value)}"
        if isinstance(value, _GENERATORS):
            raise NoFingerprintError(f"a {type(value).__qualname__} hangs on the module")
        if isinstance(value, type) or type(value) in _NAMED:
            return self.exact(value)
        named = self._named(value)
        if named is not None:
            return named
        if isinstance(value, AbstractSet):
            return f"{self._class(type(value))} {sorted(map(self.loosely, value))}"
        return self.outline(value, attributes=False)

    def _inside(self, value: Any) -> list[Any]:
        """Elements of a container, attributes of a module, names included."""
        found: list[Any] = []
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            found += [value.func, value.args, value.keywords]
        if isinstance(value, HookTable):
            found += value.hooks.values()
        elif isinstance(value, dict):
            found += [each for pair in dict.items(value) for each in pair]
        elif isinstance(value, (list, tuple)):
            found += value
        if isinstance(value, nn.Module):
            own = vars(value) | self.hooks.of(value)
            found += [each for pair in own.items() for each in pair]
        return found

    def loosely(self, value: Any, depth: int = 3) -> str:
        """Exact where that can be, else the class."""
        known = len(self._functions), len(self._classes), len(self.codes)
        try:
            return self.exact(value, depth)
        except NoFingerprintError:
            # What was seen on the way is in no text.
            functions, classes, codes = known
            while len(self._functions) > functions:
                self._functions.popitem()
            while len(self._classes) > classes:
                self._classes.popitem()
            self.codes.forget(codes)
            return f"some {self._name(type(value))}"

    def _plainly(self, value: Any) -> str:
        return self.exact(value) if type(value) in PLAIN else self._name(type(value))

    def _named(self, value: Any) -> str | None:
        """Text of a function, a module, an operator, or of what wraps a function."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return f"code {self.codes.of(value)}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, OVERLOAD):
            return f"operator {value.name()}"
        if isinstance(value, torch._ops.OpOverloadPacket):
            return f"operators {value._qualified_op_name}"
        if isinstance(value, types.MethodType):
            owner = value.__self__
            of = self._name(owner) if isinstance(owner, type) else self._name(type(owner))
            return f"method of {of}, {self.loosely(value.__func__)}"
        if isinstance(value, _BUILTIN):
            owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
            of = self._name(owner) if isinstance(owner, type) else self._name(type(owner))
            of = owner.__name__ if isinstance(owner, types.ModuleType) else of
            return f"builtin {of}.{getattr(value, '__qualname__', value.__name__)}"
        if isinstance(value, _WRAPPERS):
            return f"{type(value).__name__} {self.loosely(value.__func__)}"
        if type(value) is property:
            parts = (value.fget, value.fset, value.fdel)
            return f"property {[self.loosely(part) for part in parts]}"
        name = getattr(value, "_name", None) if type(value).__module__ == "typing" else None
        if isinstance(name, str) and getattr(typing, name, None) is value:  # ``Any`` and the like
            return f"typing.{name}"
        if isinstance(value, functools.cached_property):
            return f"cached property {self.loosely(value.func)}"
        return None

    def _function(self, function: types.FunctionType) -> str:
        known = self._functions.get(id(function))
        if known is None:
            name = f"{function.__module__}.{function.__qualname__}"
            self._functions[id(function)] = f"function {name}", function  # where it holds itself
            result = self._constant(function) if _CONSTANT in vars(function) else ""
            cells = [self._cell(cell) for cell in function.__closure__ or ()]
            # Dynamo notes the address of what it wraps.
            own = {key: each for key, each in vars(function).items() if type(each) is not int}
            parts = (function.__defaults__, function.__kwdefaults__, own)
            held = [self.loosely(part) for part in parts]
            text = f"function {name} {self.codes.of(function.__code__)} {held} {cells} {result}"
            known = self._functions[id(function)] = text, function
        return known[0]

    def _constant(self, function: types.FunctionType) -> str:
        """What a function says whose result tracing is told to take for a constant."""
        code = function.__code__
        if not code.co_argcount + code.co_kwonlyargcount:
            with contextlib.suppress(Exception):  # such a function would fail while it is traced
                return self.exact(function())
        self.constant.add(f"{function.__module__}.{function.__qualname__}")
        return ""

    def _cell(self, cell: types.CellType) -> str:
        try:
            return self.loosely(cell.cell_contents)
        except ValueError:
            return "empty"

    def _class(self, kind: type) -> str:
        """A class's name, and a digest of its methods and attributes, those it inherits included.
        Classes that it refers to are only named.
        """
        if self._in_class:
            return self._name(kind)
        if kind not in self._classes:
            self._in_class += 1
            try:
                digest = hashlib.sha256()
                for each in kind.__mro__:
                    digest.update(f"{self._name(each)}\n".encode())
                    digest.update(f"{_registered(each)}\n".encode())
                    if each.__flags__ & _HEAP_TYPE:
                        for name, value in sorted(vars(each).items()):
                            if name not in _UNREAD:
                                digest.update(f"{name}: {self.loosely(value)}\n".encode())
            finally:
                self._in_class -= 1
            self._classes[kind] = f"{self._name(kind)} {digest.hexdigest()}"
        return self._classes[kind]

    @staticmethod
    def _name(kind: type) -> str:
        return f"class {kind.__module__}.{kind.__qualname__}"


def _layout(value: Tensor) -> tuple[Any, ...]:
    """Sizes, strides, offset and the bytes of the storage; those that are left open by that."""
    marked = getattr(value, OPEN, None)
    if not marked:
        size = value.untyped_storage().nbytes()
        return tuple(value.shape), value.stride(), value.storage_offset(), size
    if not value.is_contiguous():
        raise NoFingerprintError("sizes of a tensor are left open that is not contiguous")
    sizes = [None if at in marked else size for at, size in enumerate(value.shape)]
    return sizes, value.storage_offset()


def _registered(kind: type) -> list[str]:
    """Names of the classes that count as subclasses of an abstract one, as ``isinstance`` asks."""
    if type(kind) is not abc.ABCMeta or kind.__module__.startswith(("collections.", "typing")):
        return []
    dump: Any = vars(abc)["_get_dump"]
    found = (each() for each in dump(kind)[0])
    return sorted(f"{each.__module__}.{each.__qualname__}" for each in found if each is not None)
