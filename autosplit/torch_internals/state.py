"""Versions, bytes and references of tensors, parameters and buffers by name, and bytes of optimizer
state.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import attrgetter, getitem, is_, is_not
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .dtensor import is_dtensor, local_tensor

VERSION = attrgetter("_version")
"""Reads autograd's version counter of a tensor; raises one of ``UNCOUNTED`` if there is none."""
UNCOUNTED = (AttributeError, RuntimeError)


def versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    """Autograd's version counter of each tensor; 0 for numbers."""
    # Some kernels return None for a fake tensor (an unused workspace). Inference tensors and
    # numbers have no version.
    counted = [(t, isinstance(t, torch.Tensor) and not t.is_inference()) for t in tensors]
    return tuple([tensor._version if is_counted else 0 for tensor, is_counted in counted])


_OTHER_MEMORY = "_autosplit_other_memory"


def allow_other_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Mark tensors whose values may be at another address in each call."""
    for tensor in tensors:
        setattr(tensor, _OTHER_MEMORY, True)


def allows_other_memory(tensor: torch.Tensor) -> bool:
    """Whether ``allow_other_memory`` has marked a tensor."""
    return hasattr(tensor, _OTHER_MEMORY)


def storage_sizes(
    tensors: Iterable[torch.Tensor | None],
) -> dict[tuple[torch.device, int], int]:
    """Bytes of each storage of the tensors, by device and address.

    Sparse tensors count their indices and values, and DTensors their local tensors.
    """
    storages = (part.untyped_storage() for tensor in tensors for part in _strided_parts(tensor))
    return {(storage.device, storage.data_ptr()): storage.nbytes() for storage in storages}


def distinct_storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the tensors' storages; a storage that several tensors share counts once."""
    return sum(storage_sizes(tensors).values())


def _strided_parts(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    if tensor is None:
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [local_tensor(tensor)]


_REGISTRIES = ("_modules", "_parameters", "_buffers")


class StateReader:
    """Reads the present parameters and buffers of a module by name.

    The reader keeps the dictionaries in which names are registered. So it finds tensors that were
    replaced, and walks the module tree again only if a name was added or removed, or a submodule
    or a dictionary that had names was replaced. Tensors inside of a tensor subclass (quantized
    weights) are included, under the names of their attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._index()

    def _index(self) -> None:
        slots: dict[str, tuple[dict[str, Any], str]] = {}
        children: list[tuple[dict[str, Any], str]] = []
        self._registries: list[dict[str, Any]] = []
        named: list[tuple[dict[str, Any], str, dict[str, Any]]] = []
        for prefix, child in self._module.named_modules(remove_duplicate=False):
            modules, *spaces = map(_table, (child._modules, child._parameters, child._buffers))
            self._registries += modules, *spaces
            # A TorchScript module has none of these attributes.
            named += [
                (vars(child), name, table)
                for name, table in zip(_REGISTRIES, (modules, *spaces), strict=True)
                if table and name in vars(child)
            ]
            children += [(modules, name) for name in modules]
            for space in spaces:
                for name in space:
                    slots[f"{prefix}.{name}" if prefix else name] = (space, name)
        # Columns, for lookups without a Python call for each.
        self._names = list(slots)
        self._spaces = [space for space, _ in slots.values()]
        self._keys = [name for _, name in slots.values()]
        self._tables = [modules for modules, _ in children]
        self._children = [name for _, name in children]
        self._owners = [attributes for attributes, _, _ in named]
        self._registry_names = [name for _, name, _ in named]
        self._named_registries = [table for _, _, table in named]
        self._submodules = list(map(dict.get, self._tables, self._children))
        self._count = len(slots) + len(children)
        state = zip(self._names, map(getitem, self._spaces, self._keys), strict=True)
        self._holding = [name for name, tensor in state if _holds_tensors(tensor)]
        self._tensors: list[Any] = []
        self._latest = _State()

    def read(self) -> Mapping[str, torch.Tensor]:
        """The module's parameters and buffers by name, as they are now.

        Returns:
            the same object as before, if no tensor was added, removed or replaced. Another object
            each time, if a tensor subclass holds tensors.
        """
        submodules = map(dict.get, self._tables, self._children)
        registries = map(getitem, self._owners, self._registry_names)
        if (
            any(map(is_not, submodules, self._submodules))
            or any(map(is_not, registries, self._named_registries))
            or sum(map(len, self._registries)) != self._count
        ):
            self._index()
        try:
            tensors = [*map(getitem, self._spaces, self._keys)]
        except KeyError:  # one name was removed and another added
            self._index()
            tensors = [*map(getitem, self._spaces, self._keys)]
        latest = self._tensors
        if len(latest) == len(tensors) and not self._holding and all(map(is_, tensors, latest)):
            return self._latest
        state = _State(zip(self._names, tensors, strict=True))
        for name in self._holding:
            state.update(_tensors_of(name, state[name]))
        if any(map(is_, tensors, repeat(None))):
            state = _State((name, tensor) for name, tensor in state.items() if tensor is not None)
        self._tensors, self._latest = tensors, state
        return state


class _State(dict[str, Any]):
    """The parameters and buffers of a module by name. Attributes of parameters that graphs read,
    such as a weight's main_grad, are looked up on access.
    """

    def __missing__(self, name: str) -> Any:
        parameter, _, attribute = name.rpartition(".")
        if parameter not in self:
            raise KeyError(name)
        return getattr(self[parameter], attribute)


def _holds_tensors(tensor: torch.Tensor | None) -> bool:
    """Whether a parameter or buffer is of a tensor subclass whose inner tensors become inputs of
    graphs.
    """
    return is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor)


def _tensors_of(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    for attribute in tensor.__tensor_flatten__()[0]:
        inner, path = local_tensor(getattr(tensor, attribute)), f"{name}.{attribute}"
        yield path, inner
        if _holds_tensors(inner):
            yield from _tensors_of(path, inner)


def _table(names: Any) -> dict[str, Any]:
    """A module's parameters, buffers or submodules as a dictionary; a copy for a TorchScript
    module, which has no dictionary.
    """
    return names if isinstance(names, dict) else dict(names.items())


def share_state(proxy: nn.Module, module: nn.Module) -> None:
    """Share the parameters, buffers and submodules of ``module`` with ``proxy``.

    The two modules share the dictionaries. Both have the same ``state_dict``, without a prefix, and
    a parameter replaced in one is replaced in the other.
    """
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        proxy.__dict__[name] = module.__dict__[name]
    proxy.training = module.training


def register_state(
    stage: nn.Module,
    model: nn.Module,
    names: Iterable[str],
    container: Callable[[str], nn.Module],
) -> None:
    """Register parameters and buffers of ``model`` in ``stage``, under the same names.

    Submodules of the stage are made by ``container``, which takes their name.
    """
    for name in names:
        *path, last = name.split(".")
        owner, place = model, stage
        for depth, part in enumerate(path, 1):
            owner = getattr(owner, part)
            if part not in place._modules:
                place.add_module(part, container(".".join(path[:depth])))
            place = place._modules[part]  # type: ignore[assignment]
        if last in owner._parameters:
            place.register_parameter(last, owner._parameters[last])
        else:
            lasting = last not in owner._non_persistent_buffers_set
            place.register_buffer(last, owner._buffers[last], persistent=lasting)
        place.train(owner.training)


@contextlib.contextmanager
def preserve_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context that restores the training mode of every submodule at its end."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


_SIDE = 8
"""Largest dimension of the small tensors in place of parameters: enough to show state by row."""


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of an optimizer's state, or of the state that its first step will create.

    To predict, a copy of the optimizer steps on small tensors with as many dimensions as the
    parameters. The bytes of its state are scaled to the parameters' sizes. The prediction is 0 if
    the copy's step fails.
    """
    if optimizer is None:
        return 0
    values = chain.from_iterable(state.values() for state in optimizer.state.values())
    present_bytes = distinct_storage_bytes(v for v in values if isinstance(v, Tensor))
    return present_bytes or _predicted(optimizer)


def _predicted(optimizer: torch.optim.Optimizer) -> int:
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()  # the user's hooks run in real steps only
    pairs: list[tuple[Tensor, nn.Parameter]] = []
    twin.param_groups = []
    for group in optimizer.param_groups:
        small = [_small(parameter) for parameter in group["params"]]
        pairs += zip(group["params"], small, strict=True)
        twin.param_groups.append({**group, "params": small})
    try:
        type(optimizer).step(twin)
    except Exception:  # any optimizer's step may fail on small tensors
        return 0
    total = 0.0
    for parameter, stand_in in pairs:
        for value in twin.state.get(stand_in, {}).values():
            if isinstance(value, Tensor):
                share = local_tensor(parameter).numel() / stand_in.numel() if value.dim() else 1.0
                total += value.numel() * value.element_size() * share
    return int(total)


def _small(parameter: Tensor) -> nn.Parameter:
    shape = [min(side, _SIDE) for side in parameter.shape]
    small = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    small.grad = torch.zeros_like(small)
    return small


tensor_users = Tensor._use_count  # type: ignore[attr-defined]
"""C++ reference count of a tensor, its Python object included."""


def any_referenced(gradients: Iterable[Tensor]) -> bool:
    """Whether a gradient is referenced by anything but the ``.grad`` of one parameter and the list
    ``gradients``.

    References to a gradient's memory count too: views, NumPy arrays, flat buffers.
    """
    if type(gradients) is list and _are_unreferenced(gradients):
        return False
    for gradient in gradients:
        if getrefcount(gradient) > _REFERENCES or tensor_users(gradient) > _USERS:
            return True
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            continue
        storage = gradient.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata)
        if users > _STORAGE and gradient._base is not None and not _is_held_base(gradient):
            users -= 1  # the base of the view, which nothing else refers to
        if users > _STORAGE or getrefcount(storage) > _HANDLES:
            return True
    return False


def _are_unreferenced(gradients: list[Tensor]) -> bool:
    """Whether nothing refers to the gradients. False if that takes a closer look, as for views.

    It takes half of the time, and no Python object of a storage, which would then stay.
    """
    try:
        return _largest_counts(gradients) == _UNREFERENCED
    except (RuntimeError, ValueError):  # a sparse gradient, or none
        return False


def _largest_counts(gradients: list[Tensor]) -> tuple[int, int, int]:
    """The largest counts of references: to Python objects, to tensors and to storages."""
    storages = map(torch._C._storage_address, gradients)  # type: ignore[attr-defined]
    return (
        max(map(getrefcount, gradients)),
        max(map(tensor_users, gradients)),
        max(map(torch._C._storage_Use_Count, storages)),
    )


def _is_held_base(view: Tensor) -> bool:
    base: Any = view._base
    return tensor_users(base) > _USERS or getrefcount(base) >= _REFERENCES


def _unreferenced_counts() -> tuple[tuple[int, int, int], int, int, int, int]:
    """The reference counts that ``any_referenced`` reads, for a gradient without other references:
    all at once, and one by one.
    """
    parameter = torch.zeros((), requires_grad=True)
    parameter.grad = torch.zeros(())
    gradients = [parameter.grad]
    at_once = _largest_counts(gradients)
    for gradient in gradients:
        storage = gradient.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata)
    return at_once, getrefcount(gradient), tensor_users(gradient), users, getrefcount(storage)


with torch.inference_mode(False):
    _UNREFERENCED, _REFERENCES, _USERS, _STORAGE, _HANDLES = _unreferenced_counts()
