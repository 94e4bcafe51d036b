"""Models without the memory of their parameters: those are on the meta device, buffers are real.

Under ``torch.device("meta")`` everything a constructor makes is without values, buffers such as
rotary tables too, and nothing brings those back that no checkpoint has. Here a constructor makes
its tensors as ever; a parameter goes to the meta device at the moment at which a module registers
it. Fresh memory costs nothing before it is written to, and the filling in of initial values comes
after the registration, when there is nothing left to fill.

Then their initial values, by the constructors once more. The random numbers that a call draws
depend on a seed and on which call it is, not on what was drawn before: so a parameter starts with
the same values however many stages there are, and whoever has the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autosplit.device import generators_kept
from autosplit.errors import PlanError

Built = TypeVar("Built")
Values = Callable[[Sequence[str]], dict[str, Tensor]]
"""Of parameters and buffers, by their names."""
_RECIPE = "_autosplit_recipe"


def meta_model(factory: Callable[[], Built]) -> Built:
    """What ``factory`` builds, its parameters on the meta device and its buffers as they should be.

    Parameters that are tied stay so. At most one module's parameters have memory at a time. The
    model remembers the factory, which runs again for the initial values. A buffer of random numbers
    has others than on a real device, as none were drawn for parameters.

    Args:
        factory: returns the model, or a tuple that begins with the model.

    Raises:
        PlanError: the factory returns something else.
    """
    with _registering(lambda number: False) as filled:
        built = factory()
    model = model_of(built)
    tensors = model.named_parameters(remove_duplicate=False)
    numbers = {name: filled[tensor] for name, tensor in tensors if tensor in filled}
    model.__dict__[_RECIPE] = factory, numbers
    return built


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


@contextlib.contextmanager
def _registering(
    keep: Callable[[int], bool], after: Callable[[int], None] = lambda number: None
) -> Iterator[WeakIdKeyDictionary]:
    """Inside, parameters that this thread registers go to the meta device.

    Args:
        keep: told as which one of all a parameter is registered, whether it shall stay as it is.
        after: told the same once that is done.

    Yields:
        as which one each parameter was registered that came with values of its own.
    """
    filled, results, thread = WeakIdKeyDictionary(), WeakIdKeyDictionary(), threading.get_ident()
    numbers = itertools.count()

    def register(module: nn.Module, name: str, given: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or is_lazy(given):
            return None
        if given not in results:
            number = next(numbers)
            result = given if given.is_meta or keep(number) else _on_meta(given)
            if not given.is_meta:
                filled[result] = number
            results[given] = results[result] = result
            after(number)
        return cast("nn.Parameter", results[given])

    # Its annotation forgets that a hook may return a parameter.
    handle = register_module_parameter_registration_hook(cast("Callable[..., None]", register))
    try:
        yield filled
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
    before = {name: tensor for name, tensor in named_tensors(model).items() if tensor.is_meta}
    made: dict[int, Tensor] = {}
    try:
        for name, tensor in before.items():
            if id(tensor) not in made:
                made[id(tensor)] = alike(_stand_in(tensor, torch.device(device)), tensor)
            assign(model, name, made[id(tensor)])
        yield
    finally:
        for name, tensor in before.items():
            assign(model, name, tensor)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, then all buffers, under all their names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


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


@torch.no_grad()
def initial_values(model: nn.Module, names: Sequence[str], *, seed: int = 0) -> dict[str, Tensor]:
    """The values with which parameters and buffers of a model start, on the CPU.

    A meta model's factory is run again, with only the wanted parameters in memory, so that its
    constructors fill them in. A model that came onto the meta device otherwise has no factory, and
    what its constructors filled is lost.

    Args:
        model: a model with parameters on the meta device.
        names: of those that are wanted.
        seed: of all random numbers; the global generators stay as they are.

    Raises:
        PlanError: nobody initialises one, or the factory built another model.
    """
    found = model
    if _RECIPE in model.__dict__:
        with generators_kept():
            found = _rebuilt(model, names, seed)
    known = named_tensors(found)
    if lacking := [name for name in names if known[name].is_meta]:
        raise PlanError(
            f"nothing initialises {', '.join(lacking)}: build the model with "
            "autosplit.meta_model(factory), which runs the constructors for them"
        )
    return {name: known[name].detach() for name in names}


def _rebuilt(model: nn.Module, names: Sequence[str], seed: int) -> nn.Module:
    factory, numbers = model.__dict__[_RECIPE]
    # What is copied or computed from other parameters is so from their values.
    derived = not numbers.keys() >= {*names}
    wanted = {numbers[name] for name in names if name in numbers}
    numbered = Numbered(seed)
    # Moving a parameter away takes calls that one who keeps it does not make.
    with numbered, _registering(lambda n: derived or n in wanted, numbered.restart):
        found = model_of(factory())
    before, after = _shapes(model), _shapes(found)
    if before != after:
        differing = [n for n in before.keys() | after.keys() if before.get(n) != after.get(n)]
        raise PlanError(
            "the factory built another model than the first time; different are "
            f"{', '.join(sorted(differing)[:10])}: let it always build the same, and whatever "
            "adds parameters be a part of it"
        )
    return found


class Numbered(TorchFunctionMode):
    """Seeds the random numbers of each call inside by ``seed`` and its number, which is counted
    anew behind each parameter that is registered.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self.restart(-1)

    def restart(self, part: int) -> None:
        """Count anew, for what comes behind parameter ``part``."""
        self._prefix = f"{self._seed}/factory/{part}/"
        self._count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._count += 1
        digest = hashlib.sha256(f"{self._prefix}{self._count}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little"))
        return func(*args, **(kwargs or {}))


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in named_tensors(model).items()}


@torch.no_grad()
def materialise_stage(module: nn.Module, values: Values | None) -> nn.Module:
    """Give what ``module`` has on the meta device memory on the CPU and values, in place.

    Parameters that were one stay one.

    Args:
        module: a stage, or any module whose parameters and buffers have the names of the whole
            model.
        values: may be None where nothing is on the meta device. What is not stays as it is.

    Returns:
        ``module``.

    Raises:
        PlanError: there are no values.
    """
    lacking = {name: each for name, each in named_tensors(module).items() if each.is_meta}
    if lacking and values is None:
        listed = ", ".join([*lacking][:5]) + (", ..." if len(lacking) > 5 else "")
        raise PlanError(
            f"{listed}: on the meta device, and nothing says which values to start with: call "
            "initialise() on the plan before its stages are built; load_checkpoint(trainer, path) "
            "then takes up those of a checkpoint"
        )
    first: dict[int, str] = {}
    for name, tensor in lacking.items():
        first.setdefault(id(tensor), name)
    found = {} if values is None else values([*first.values()])
    made: dict[int, Tensor] = {}
    for key, name in first.items():
        made[key] = alike(torch.empty_like(lacking[name], device="cpu"), lacking[name])
        # Taken out, so that there is one tensor twice at a time and not all of them.
        made[key].copy_(found.pop(name))
    for name, tensor in lacking.items():
        assign(module, name, made[id(tensor)])
    return module
