"""Models without the memory of their parameters: those are on the meta device, buffers are real.

Under ``torch.device("meta")`` everything a constructor makes is without values, buffers such as
rotary tables too, and nothing brings those back that no checkpoint has. Here a constructor makes
its tensors as ever; a parameter goes to the meta device at the moment at which a module registers
it. Fresh memory costs nothing before it is written to, and the filling in of initial values comes
after the registration, when there is nothing left to fill.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from autosplit.errors import PlanError

Built = TypeVar("Built")
_RECIPE = "_autosplit_recipe"


@dataclass(frozen=True)
class Recipe:
    """How a meta model was built, so that it can be built again with some parameters real.

    Attributes:
        factory: what built it.
        order: for each parameter's name, as which one of all it was registered.
        derived: names of parameters and buffers that have no values of their own at registration:
            copied or computed from other parameters.
    """

    factory: Callable[[], Any]
    order: dict[str, int]
    derived: frozenset[str]


def meta_model(factory: Callable[[], Built]) -> Built:
    """What ``factory`` builds, its parameters on the meta device and its buffers as they should be.

    Parameters that are tied stay so. At most one module's parameters have memory at a time. The
    model remembers the factory, which ``Initialiser`` runs again for the initial values. A buffer
    of random numbers has others than on a real device, as none were drawn for parameters.

    Args:
        factory: returns the model, or a tuple that begins with the model.

    Raises:
        PlanError: the factory returns something else.
    """
    with registering(lambda order: False) as registrations:
        built = factory()
    model = model_of(built)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    order = {n: registrations.order[p] for n, p in tensors.items() if p in registrations.order}
    derived = {name for name, p in tensors.items() if p not in registrations.own}
    derived |= {name for name, b in named_buffers(model).items() if b.is_meta}
    model.__dict__[_RECIPE] = Recipe(factory, order, frozenset(derived))
    return built


def recipe_of(model: nn.Module) -> Recipe | None:
    """How ``meta_model`` built ``model``; None if it did not."""
    return model.__dict__.get(_RECIPE)


def model_of(built: Any) -> nn.Module:
    """The model among what a factory returned.

    Raises:
        PlanError: there is none.
    """
    model = built[0] if isinstance(built, tuple) and built else built
    if not isinstance(model, nn.Module):
        raise PlanError(
            "a factory must return an nn.Module, or a tuple that begins with one; "
            f"got a {type(model).__name__}"
        )
    return model


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """All buffers under all their names."""
    return dict(model.named_buffers(remove_duplicate=False))


class Registrations:
    """Moves parameters to the meta device when a module registers them.

    Args:
        keep: told as which one of all a parameter is registered, whether it shall stay as it is.
        after: told the same once that is done.

    Attributes:
        order: as which one each parameter was registered.
        own: the parameters that came with values.
    """

    def __init__(self, keep: Callable[[int], bool], after: Callable[[int], None]) -> None:
        self.order = WeakIdKeyDictionary()
        self.own = WeakIdKeyDictionary()
        self._keep = keep
        self._after = after
        self._result = WeakIdKeyDictionary()
        self._thread = threading.get_ident()
        self._count = 0

    def __call__(
        self, module: nn.Module, name: str, parameter: nn.Parameter
    ) -> nn.Parameter | None:
        """The hook: None keeps the parameter, and so it does for other threads' modules."""
        if threading.get_ident() != self._thread or is_lazy(parameter):
            return None
        if parameter in self._result:
            return cast("nn.Parameter", self._result[parameter])
        kept = parameter.is_meta or self._keep(self._count)
        result = parameter if kept else _on_meta(parameter)
        if not parameter.is_meta:
            self.own[result] = True
        self.order[result] = self._count
        self._result[parameter] = self._result[result] = result
        self._after(self._count)
        self._count += 1
        return result


@contextlib.contextmanager
def registering(
    keep: Callable[[int], bool], after: Callable[[int], None] = lambda order: None
) -> Iterator[Registrations]:
    """Inside, parameters that this thread registers go to the meta device unless kept."""
    registrations = Registrations(keep, after)
    # Its annotation forgets that a hook may return a parameter.
    handle = register_module_parameter_registration_hook(cast("Callable[..., None]", registrations))
    try:
        yield registrations
    finally:
        handle.remove()


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    result = alike(torch.empty_like(parameter, device="meta"), parameter)
    return cast("nn.Parameter", result)


@contextlib.contextmanager
def stand_in_tensors(model: nn.Module, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, what is on the meta device has a stand-in on ``device``, with any values.

    For tracing, which wants one device but looks at no values. Stand-ins take no room: on the CPU
    they are pages that are never touched, elsewhere one element that stands for all. Tied tensors
    stay tied.
    """
    wanted = {name for name, tensor in named_tensors(model).items() if tensor.is_meta}
    make = partial(_stand_in, device=torch.device(device))
    with substituted(model, wanted, make):
        yield


@contextlib.contextmanager
def substituted(
    model: nn.Module, names: Iterable[str], substitute: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Inside, other tensors take the place of the named ones; the old ones come back after.

    Args:
        model: the model to change.
        names: which parameters and buffers; where tensors are tied, all their names.
        substitute: gives the values for a tensor; it is asked once for tied ones.
    """
    before = named_tensors(model)
    chosen = {name: before[name] for name in names}
    values = {id(tensor): tensor for tensor in chosen.values()}
    try:
        values = {key: alike(substitute(tensor), tensor) for key, tensor in values.items()}
        for name, tensor in chosen.items():
            assign(model, name, values[id(tensor)])
        yield
    finally:
        for name, tensor in chosen.items():
            assign(model, name, tensor)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, then all buffers, under all their names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | named_buffers(model)


def assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put ``tensor`` where ``model`` has a parameter or buffer called ``name``."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, tensor)


def alike(values: Tensor, original: Tensor) -> Tensor:
    """``values`` as a parameter with the flags and attributes of ``original``, if it is one."""
    if not isinstance(original, nn.Parameter):
        return values.detach()
    parameter = nn.Parameter(values.detach(), requires_grad=original.requires_grad)
    parameter.__dict__.update(original.__dict__)
    return parameter


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    # torch.empty would write to it under torch.use_deterministic_algorithms.
    size = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    storage = torch.UntypedStorage(size * tensor.element_size())
    with torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            storage, 0, tensor.shape, tensor.stride()
        )
