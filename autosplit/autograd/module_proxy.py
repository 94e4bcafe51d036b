"""``ModuleProxy``: a module that shares the state, attributes and names of another module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, Self

from torch import nn

from autosplit.errors import SplitError
from autosplit.torch_internals.autograd import in_compiler, is_exported, untraced
from autosplit.torch_internals.state import share_state

# Python looks these up on the class, not by ``__getattr__``. A proxy has them if its model does.
_CONTAINER = (
    "__len__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__iter__",
    "__reversed__",
    "__contains__",
    "__bool__",
    "__enter__",
    "__exit__",
)
_SHARED_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class ProxiedForward:
    """Decorator that gives a proxy's ``forward`` the signature of the model's forward.

    A signature belongs to a function, so each proxy gets a function of its own. torch.compile does
    not trace that function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = untraced(function)

    def __get__(self, proxy: ModuleProxy | None, kind: type | None = None) -> Any:
        if proxy is None:
            return self.function
        if is_exported():
            return proxy.__dict__["unsplit"]  # an exported model has no backward to split
        return MethodType(proxy.__dict__["_forward"], proxy)


class StateOfModel:
    """An attribute of torch's modules that a proxy reads from its model and sets on its model.

    A reference of the proxy's own would be stale once the model has another: ``nn.Sequential``
    replaces its dictionary of submodules when one is deleted.
    """

    def __set_name__(self, kind: type, name: str) -> None:
        self.name = name

    def __get__(self, proxy: ModuleProxy | None, kind: type | None = None) -> Any:
        return self if proxy is None else getattr(proxy.__dict__["unsplit"], self.name)

    def __set__(self, proxy: ModuleProxy, value: Any) -> None:
        model = proxy.__dict__.get("unsplit")
        if model is None:  # in the constructor of nn.Module
            proxy.__dict__[self.name] = value
        else:
            setattr(model, self.name, value)


class ModuleProxy(nn.Module):
    """A module that stands in for ``model`` and shares its state.

    Parameters, buffers and submodules are the same objects under the same names, and an attribute
    that is set on the proxy is set on the model. A proxy is an instance of the model's class for
    ``isinstance``, and a container if the model is one.

    A subclass decorates its ``forward`` with ``ProxiedForward``, and keeps its own attributes in
    ``__dict__``. A method that is replaced on the proxy (``proxy.forward = ...``) replaces the
    proxy's method, not the model's.

    Attributes:
        unsplit: the model.
        model: the model. If the model itself has an attribute or a submodule named ``model``, as
            most models of transformers do, that attribute or submodule instead.
    """

    unsplit: nn.Module
    model: nn.Module
    training: Any = StateOfModel()
    _parameters: Any = StateOfModel()
    _buffers: Any = StateOfModel()
    _modules: Any = StateOfModel()
    _non_persistent_buffers_set: Any = StateOfModel()

    def __new__(cls, model: nn.Module, *args: Any, **kwargs: Any) -> Self:
        proxy: Self = _blank(cls, _special_methods(type(model)))
        return proxy

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["unsplit"] = model  # not a submodule: names keep no prefix
        self._share()

    def _share(self) -> None:
        model = self.__dict__["unsplit"]
        share_state(self, model)
        for name in _SHARED_HOOKS:
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["_forward"] = _with_signature_of(type(self).forward, model)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's class, for code that checks what a model is.

        ``type(proxy)`` is the proxy's class. Under torch.compile, this property also returns the
        proxy's class, because torch.compile calls the methods of the class that this property
        returns.
        """
        model = self.__dict__.get("unsplit")
        return type(self) if model is None or in_compiler() else model.__class__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.unsplit!r})"

    def train(self, mode: bool = True) -> Self:
        self.unsplit.train(mode)
        return self

    def apply(self, fn: Any) -> Self:
        self.unsplit.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.unsplit._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.unsplit.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.unsplit.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.unsplit._load_from_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # By __deepcopy__, copy.deepcopy would copy the model instead of the proxy.
        if "unsplit" not in self.__dict__ or name == "__deepcopy__":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name == "model" and not hasattr(self.unsplit, name):
            return self.unsplit
        return getattr(self.unsplit, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" and set(value.__mro__) - set(type(self.unsplit).__mro__) <= {value}:
            # torch.nn.utils.parametrize: a subclass without another base, or back to the class.
            self.unsplit.__class__ = value
        elif name == "__class__":
            raise SplitError(
                f"a {type(self).__name__} cannot become a {value.__name__}: libraries that change "
                "a module's class (torch.distributed's fully_shard, for example) expect weight "
                "gradients in backward(). The model may have been changed already: build it "
                "anew, and split the sharded module, autosplit.split(fully_shard(model)), or "
                "wrap the split module in DistributedDataParallel"
            )
        elif name in self.__dict__ or "unsplit" not in self.__dict__ or self._is_own(name, value):
            super().__setattr__(name, value)
        else:
            setattr(self.unsplit, name, value)

    def _is_own(self, name: str, value: Any) -> bool:
        """Whether an attribute that is being set belongs to the proxy: a replaced method of torch's
        modules, a saved method, or a settable property.

        If such a method were set on the model, the model and the proxy would call each other
        without end.

        Raises:
            SplitError: the name is a member of the proxy's class, and not of the model.
        """
        forward = self.__dict__.get("forward")
        if getattr(value, "__self__", None) is self or (value is not None and value is forward):
            return True
        kind = type(self)
        if hasattr(nn.Module, name) or not hasattr(kind, name):
            return hasattr(nn.Module, name)
        if isinstance(getattr(kind, name), property) and getattr(kind, name).fset:
            return True
        if not hasattr(self.unsplit, name):
            raise SplitError(
                f"{name!r} is a member of {kind.__name__}, and the model has no attribute of that "
                f"name. To set it on the model, set .unsplit.{name}"
            )
        return False

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.unsplit, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        attributes: dict[str, Any] = self.__getstate__()  # type: ignore[no-untyped-call]
        state = {key: value for key, value in attributes.items() if key != "_forward"}
        kind = type(self)
        return _blank, (getattr(kind, "_plain", kind), _special_methods(kind)), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._share()


def _blank(kind: type, special: tuple[str, ...]) -> Any:
    """Create an empty proxy of ``kind`` with the special methods named in ``special``. Pickles of
    proxies name this function.
    """
    return object.__new__(_with_special(kind, special))


def _special_methods(kind: type) -> tuple[str, ...]:
    """Names of the container and context-manager methods of a class."""
    return tuple(name for name in _CONTAINER if hasattr(kind, name))


@functools.cache
def _with_special(kind: type, special: tuple[str, ...]) -> type[Any]:
    """Return a subclass of ``kind`` whose special methods, such as ``__len__``, call those of the
    model.
    """
    if not special:
        return kind
    body: dict[str, Any] = {name: _forwarded(name) for name in special}
    body |= {"_plain": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), body)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: ModuleProxy, *args: Any) -> Any:
        return getattr(type(self.unsplit), name)(self.unsplit, *args)

    return method


def _with_signature_of(function: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """The function, with the signature of the model's ``forward`` if ``forward`` has a signature.

    torch.compile does not trace the function.
    """

    forward = untraced(function.__wrapped__)  # type: ignore[attr-defined]
    forward.__doc__ = model.forward.__doc__
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return forward
    proxy = inspect.Parameter("_proxy", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [proxy, *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward


def refuse_proxies(owner: str, module: nn.Module) -> None:
    """Refuse a module that is split already, or that has a split submodule.

    Raises:
        SplitError: the module or a submodule is split; names the submodule.
    """
    for name, part in module.named_modules():
        if isinstance(part, ModuleProxy):
            subject = f"its submodule {name!r}" if name else "the module"
            raise SplitError(
                f"{owner}: {subject} is split already; pass its .unsplit, the unsplit module"
            )


def refuse_split(owner: str, module: nn.Module) -> None:
    """Refuse a module whose forward is split or compiled already.

    Raises:
        SplitError: as ``refuse_proxies``; or the module is of torch.compile.
    """
    if hasattr(module, "_orig_mod"):
        raise SplitError(
            f"{owner}: the module is compiled by torch.compile, which hides its graph. Pass the "
            "module itself, which is ._orig_mod of this one, and backend='inductor' to compile it"
        )
    refuse_proxies(owner, module)
