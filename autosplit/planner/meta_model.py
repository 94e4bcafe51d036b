"""Models with parameters on the meta device and real buffers.

Under ``torch.device("meta")``, all tensors that a constructor creates lack values, including
buffers such as rotary tables, which may be in no checkpoint. ``meta_model`` instead lets a
constructor create its tensors as usual, and moves a parameter to the meta device when a module
registers it. Memory that is not yet written costs nothing, and constructors write a parameter's
initial values after its registration.

``initial_values`` runs the constructors again for some parameters. The random numbers of a call
depend on a seed and on the number of the call, not on earlier draws. So a parameter starts with the
same values under any cut.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autosplit.device import generators_kept
from autosplit.errors import PlanError
from autosplit.passes.analysis.aliasing import spanned_elements

Built = TypeVar("Built")
Values = Callable[[Sequence[str]], dict[str, Tensor]]
"""Maps names of parameters and buffers to their values."""
_RECIPE = "_autosplit_recipe"


def meta_model(factory: Callable[[], Built]) -> Built:
    """Build a model with its parameters on the meta device and real buffers.

    Tied parameters stay tied. At most one module's parameters have memory at a time. The model
    keeps the factory, which runs again for the initial values. A buffer of random numbers has other
    values than in a model built without meta_model, because no numbers were drawn for parameters
    before it.

    Args:
        factory: returns the model, or a tuple that begins with the model.

    Raises:
        PlanError: the factory returns neither a model nor such a tuple.
    """
    with _registering(lambda number: False) as filled:
        built = factory()
    model = model_of(built)
    tensors = model.named_parameters(remove_duplicate=False)
    numbers = {name: filled[tensor] for name, tensor in tensors if tensor in filled}
    model.__dict__[_RECIPE] = factory, numbers
    return built


def model_of(built: Any) -> nn.Module:
    """The model in a factory's result.

    Raises:
        PlanError: the factory did not return a model.
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
    """Context that moves parameters to the meta device when this thread registers them.

    Args:
        keep: a function that takes a parameter's number, in the order of registration, and returns
            whether the parameter keeps its values.
        after: a function that is called with the parameter's number after each registration.

    Yields:
        a dictionary that maps each parameter that kept its values to its number.
    """
    filled, results, thread = WeakIdKeyDictionary(), WeakIdKeyDictionary(), threading.get_ident()
    numbers = itertools.count()

    def register(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """Register a copy on the meta device in place of a parameter. Shared parameters stay
        shared.
        """
        if threading.get_ident() != thread or is_lazy(parameter):
            return None
        if parameter not in results:
            number = next(numbers)
            result = parameter if parameter.is_meta or keep(number) else _on_meta(parameter)
            if not parameter.is_meta:
                filled[result] = number
            results[parameter] = results[result] = result
            after(number)
        return cast("nn.Parameter", results[parameter])

    # Torch's annotation lacks that a hook may return a parameter.
    handle = register_module_parameter_registration_hook(cast("Callable[..., None]", register))
    try:
        yield filled
    finally:
        handle.remove()


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    result = alike(torch.empty_like(parameter, device="meta"), parameter)
    return cast("nn.Parameter", result)


def move_to_meta(model: nn.Module, parameters: Collection[int]) -> None:
    """Replace parameters, given by ``id``, by parameters on the meta device, so that the model does
    not keep their memory. Tied parameters stay tied.
    """
    replacements: dict[int, Tensor] = {}
    for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
        if id(parameter) in parameters:
            key = id(parameter)
            replacements[key] = replacements.get(key, _on_meta(parameter))
            assign(model, name, replacements[key])


@contextlib.contextmanager
def stand_in_tensors(
    model: nn.Module,
    device: torch.device | str = "cpu",
    dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype"),
    *,
    moved: bool = False,
) -> Iterator[None]:
    """Context in which stand-ins on ``device``, with arbitrary values, replace tensors on the meta
    device and tensors of other dtypes than ``dtype_of`` says.

    It serves tracing, which needs one device but no values. Stand-ins take no memory: on the CPU
    they are pages that are never touched, on other devices one expanded element. Tied tensors stay
    tied.

    Args:
        model: the model.
        device: the device of the stand-ins.
        moved: whether to replace parameters on any other device than ``device``, too. Stages that
            were moved share such parameters with the model.
    """
    device = torch.device(device)
    lacking = {
        name: tensor
        for name, tensor in named_tensors(model).items()
        if tensor.is_meta
        or dtype_of(tensor) is not tensor.dtype
        or (moved and isinstance(tensor, nn.Parameter) and tensor.device != device)
    }
    replacements: dict[int, Tensor] = {}
    try:
        for name, tensor in lacking.items():
            if id(tensor) not in replacements:
                stand_in = _stand_in(tensor, dtype_of(tensor), device)
                replacements[id(tensor)] = alike(stand_in, tensor)
            assign(model, name, replacements[id(tensor)])
        yield
    finally:
        for name, tensor in lacking.items():
            assign(model, name, tensor)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, then all buffers, under all their names."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer ``name`` of ``model`` by ``tensor``."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, tensor)


def alike(values: Tensor, original: Tensor) -> Tensor:
    """``values`` as a parameter with the flags and attributes of ``original``, if ``original`` is a
    parameter.
    """
    if not isinstance(original, nn.Parameter):
        return values.detach()
    parameter = nn.Parameter(values.detach(), requires_grad=original.requires_grad)
    parameter.__dict__.update(original.__dict__)
    return parameter


def _stand_in(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)
    # torch.empty would fill it under torch.use_deterministic_algorithms.
    length = spanned_elements(tensor.shape, tensor.stride())
    storage = torch.UntypedStorage(length * dtype.itemsize)
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            storage, 0, tensor.shape, tensor.stride()
        )


@torch.no_grad()
def initial_values(model: nn.Module, names: Sequence[str], *, seed: int = 0) -> dict[str, Tensor]:
    """The initial values of a model's parameters and buffers, on the CPU.

    The factory of a model of ``meta_model`` runs again with only these parameters in memory, and
    its constructors fill them in. A model that was moved to the meta device in another way has no
    factory, so its initial values are lost.

    Args:
        model: a model with parameters on the meta device.
        names: the names of the parameters and buffers.
        seed: the seed of all random numbers; the global generators are not changed.

    Raises:
        PlanError: no constructor initialises a named tensor, or the factory built another model.
    """
    source = model
    if _RECIPE in model.__dict__:
        with generators_kept():
            source = _rebuilt(model, names, seed)
    values = named_tensors(source)
    if lacking := [name for name in names if values[name].is_meta]:
        raise PlanError(
            f"nothing initialises {', '.join(lacking)}: build the model with "
            "autosplit.meta_model(factory), which runs the constructors for them"
        )
    return {name: values[name].detach() for name in names}


def _rebuilt(model: nn.Module, names: Sequence[str], seed: int) -> nn.Module:
    factory, numbers = model.__dict__[_RECIPE]
    # A parameter that is computed from others needs their values.
    derived = not numbers.keys() >= {*names}
    wanted = {numbers[name] for name in names if name in numbers}
    numbered = Numbered(seed)
    # Moving a parameter to the meta device takes calls that keeping it does not.
    with numbered, _registering(lambda n: derived or n in wanted, numbered.restart):
        rebuilt = model_of(factory())
    expected, built = _shapes(model), _shapes(rebuilt)
    if expected != built:
        differing = [n for n in expected.keys() | built.keys() if expected.get(n) != built.get(n)]
        raise PlanError(
            "the factory built another model than the first time; these differ: "
            f"{', '.join(sorted(differing)[:10])}. It must always build the same model, and "
            "include everything that adds parameters"
        )
    return rebuilt


class Numbered(TorchFunctionMode):
    """Seeds the random numbers of each call by ``seed`` and the call's number. Counting restarts
    after each registered parameter.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self.restart(-1)

    def restart(self, part: int) -> None:
        """Restart counting calls after the parameter with number ``part``."""
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
    """Replace a module's tensors on the meta device by tensors with values on the CPU, in place.

    Tied parameters stay tied.

    Args:
        module: a stage, or any module whose parameters and buffers have the names of the whole
            model.
        values: initial values; may be None if no tensor is on the meta device.

    Returns:
        ``module``.

    Raises:
        PlanError: a tensor is on the meta device, but ``values`` is None.
    """
    lacking = {name: tensor for name, tensor in named_tensors(module).items() if tensor.is_meta}
    if lacking and values is None:
        listed = ", ".join([*lacking][:5]) + (", ..." if len(lacking) > 5 else "")
        raise PlanError(
            f"no initial values for {listed} on the meta device. Call initialise() on the plan "
            "before its stages are built. To use the values of a checkpoint, then call "
            "load_checkpoint(trainer, path)"
        )
    first: dict[int, str] = {}
    for name, tensor in lacking.items():
        first.setdefault(id(tensor), name)
    initial = {} if values is None else values([*first.values()])
    materialised: dict[int, Tensor] = {}
    for key, name in first.items():
        materialised[key] = alike(torch.empty_like(lacking[name], device="cpu"), lacking[name])
        # Pop each value, so that only one tensor exists twice at a time.
        materialised[key].copy_(initial.pop(name))
    for name, tensor in lacking.items():
        assign(module, name, materialised[id(tensor)])
    return module
