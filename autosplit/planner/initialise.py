"""Initial values of a model's parameters, a few of them at a time.

The random numbers that a call draws depend on a seed and on which call it is, not on what was
drawn before: so a parameter starts with the same values however many stages there are, and
whoever has the others.

Checkpoint values for the stages of a meta-device model.

Materialises a stage's meta-device parameters: memory and values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autosplit.checkpoint.folder import open_checkpoint
from autosplit.checkpoint.naming import Naming
from autosplit.device import generators_kept
from autosplit.errors import PlanError
from autosplit.planner.meta_model import (
    Recipe,
    alike,
    assign,
    model_of,
    named_buffers,
    named_tensors,
    recipe_of,
    registering,
    substituted,
)

Init = Callable[[nn.Module], Any]


class Initialiser:
    """Gives parameters and buffers of ``model`` the values that they start with.

    A meta model's factory is run again, with only the wanted parameters in memory. What that does
    not bring, and any other model's parameters, are initialised by their modules: first by
    ``reset_parameters`` or ``_reset_parameters`` of the module that has them, as constructors do,
    then by the ``_init_weights(module)`` of the nearest module above that has one, as in
    transformers. ``init`` comes last.

    Args:
        model: a model with parameters on the meta device.
        init: called with every module, inner ones first, like ``model.apply(init)``; parameters
            that are not wanted are on the meta device and whatever it does to them is lost.
        seed: of all random numbers; the global generators stay as they are.
    """

    def __init__(self, model: nn.Module, init: Init | None = None, *, seed: int = 0) -> None:
        self._model = model
        self._init = init
        self._seed = seed

    def replaces(self, name: str) -> bool:
        """Never: what has values keeps them."""
        return False

    @torch.no_grad()
    def __call__(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The values of the parameters and buffers ``names``, on the CPU.

        Raises:
            PlanError: no such name, nobody initialises it, or the factory built another model.
        """
        known = named_tensors(self._model)
        if unknown := [name for name in names if name not in known]:
            raise PlanError(f"the model has no parameter or buffer {', '.join(unknown)}")
        recipe = recipe_of(self._model)
        with generators_kept():
            model = self._model if recipe is None else self._rebuild(recipe, names)
            found = named_tensors(model)
            own = {id(found[name]) for name in names}
            wanted = {name for name, tensor in found.items() if id(tensor) in own}
            lacking = {name for name in wanted if found[name].is_meta}
            with substituted(model, lacking, _unwritten):
                self._initialise(model, lacking, wanted)
                found = named_tensors(model)
                values = {name: found[name].detach() for name in names}
        self._check([name for name in names if name in lacking and _is_unwritten(values[name])])
        return values

    def _rebuild(self, recipe: Recipe, names: Sequence[str]) -> nn.Module:
        everything = not recipe.derived.isdisjoint(names)
        wanted = {recipe.order[name] for name in names if name in recipe.order}
        numbers = Numbered(self._seed, "factory")
        # Moving a parameter away takes calls that one who keeps it does not make.
        with numbers, registering(lambda n: everything or n in wanted, numbers.restart):
            model = model_of(recipe.factory())
        before, after = _shapes(self._model), _shapes(model)
        if before != after:
            differing = [n for n in before.keys() | after.keys() if before.get(n) != after.get(n)]
            raise PlanError(
                "the factory built another model than the first time; different are "
                f"{', '.join(sorted(differing)[:10])}: let it always build the same, and whatever "
                "adds parameters be a part of it"
            )
        return model

    def _initialise(self, model: nn.Module, lacking: set[str], wanted: set[str]) -> None:
        for name, module in _inner_first(model):
            reset = getattr(module, "reset_parameters", None)
            reset = reset or getattr(module, "_reset_parameters", None)
            if callable(reset) and _holds(module, name, lacking):
                with Numbered(self._seed, f"reset {name}"):
                    reset()
        for name, module in _inner_first(model):
            above = _initialising(model, name)
            if above is not None and _holds(module, name, lacking):
                with Numbered(self._seed, f"init_weights {name}"):
                    above(module)
        for name, module in _inner_first(model):
            if self._init is not None and _holds(module, name, wanted):
                with Numbered(self._seed, f"init {name}"):
                    self._init(module)

    def _check(self, missing: Sequence[str]) -> None:
        if not missing:
            return
        message = (
            f"nothing initialises {', '.join(missing)}: build the model with "
            "autosplit.planner.meta_model(factory), which runs the constructors for them, or give "
            "init=, a function of a module that fills them"
        )
        if lost := [name for name in missing if name in transient_buffers(self._model)]:
            message += (
                f". {', '.join(lost)}: buffers that are in no checkpoint either; their values were "
                "lost when the model was built on the meta device"
            )
        raise PlanError(message)


class Numbered(TorchFunctionMode):
    """Seeds the random numbers of each call inside by ``seed``, ``scope`` and its number."""

    def __init__(self, seed: int, scope: str) -> None:
        super().__init__()
        self._scope = f"{seed}/{scope}"
        self.restart(-1)

    def restart(self, part: int) -> None:
        """Count anew, for part ``part`` of the scope."""
        self._prefix = f"{self._scope}/{part}/"
        self._count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._count += 1
        digest = hashlib.sha256(f"{self._prefix}{self._count}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little"))
        return func(*args, **(kwargs or {}))


def transient_buffers(model: nn.Module) -> set[str]:
    """Names of the buffers that ``model.state_dict()`` leaves out."""
    return named_buffers(model).keys() - model.state_dict().keys()


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in named_tensors(model).items()}


def _unwritten(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, _mark(tensor.dtype), device="cpu")


def _is_unwritten(values: Tensor) -> bool:
    """Whether some element is as ``_unwritten`` made it."""
    if values.is_meta:
        return True
    mark = _mark(values.dtype)
    return bool((values.isnan() if mark != mark else values == mark).any())


def _mark(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _inner_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, each after the ones within; once where one is in several places."""
    yield from reversed(list(model.named_modules()))


def _holds(module: nn.Module, path: str, names: set[str]) -> bool:
    prefix = f"{path}." if path else ""
    return any(name.startswith(prefix) for name in names)


def _initialising(model: nn.Module, path: str) -> Init | None:
    """``_init_weights`` of the innermost module from ``path`` upwards that has one."""
    while True:
        found = getattr(model.get_submodule(path), "_init_weights", None)
        if callable(found):
            return cast("Init", found)
        if not path:
            return None
        path = path.rpartition(".")[0]


class CheckpointValues:
    """Gives stages the values that a checkpoint of the whole model has for them.

    Buffers that no checkpoint has, and with ``strict=False`` whatever is missing, start as
    ``Initialiser`` has them.

    Args:
        model: the whole model; if it is not on the meta device, its own tensors are overwritten.
        path: see ``open_checkpoint``.
        strict: refuse a checkpoint in which tensors are missing or too much.
        init: see ``Initialiser``.
        seed: see ``Initialiser``.

    Attributes:
        mismatches: what was missing or too much.

    Raises:
        CheckpointError: it cannot be read, or tensors are missing, too much or misshapen.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | Path,
        *,
        strict: bool = True,
        init: Init | None = None,
        seed: int = 0,
    ) -> None:
        self._reader = open_checkpoint(path)
        self._naming = Naming.of_model(model)
        self._initialiser = Initialiser(model, init, seed=seed)
        self.mismatches = self._naming.fitting(self._reader, strict=strict)

    def replaces(self, name: str) -> bool:
        """Whether the checkpoint has what the model calls ``name``."""
        entry = self._naming.own.get((0, name))
        return entry is not None and entry.source(self._reader.shapes) is not None

    def __call__(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The values of the parameters and buffers ``names``, on the CPU.

        Raises:
            PlanError: nothing gives one of them a value.
            CheckpointError: what has them is damaged.
        """
        entries = {n: self._naming.own[0, n] for n in names if self.replaces(n)}
        sources = {n: entry.source(self._reader.shapes) or "" for n, entry in entries.items()}
        self._reader.verify(dict.fromkeys(sources.values()))
        read = self._reader.read(dict.fromkeys(sources.values()))
        values = {name: read[there] for name, there in sources.items()}
        if lacking := [name for name in names if name not in entries]:
            values |= self._initialiser(lacking)
        return values


Values = Initialiser | CheckpointValues
"""What gives the values of parameters and buffers by the model's own names."""


def materialise_stage(module: nn.Module, values: Values | None) -> nn.Module:
    """Give what ``module`` has on the meta device memory on the CPU and values, in place.

    Parameters that were one stay one.

    Args:
        module: a stage, or any module whose parameters and buffers have the names of the whole
            model.
        values: may be None where nothing is on the meta device. What is not stays where it is, and
            only a ``CheckpointValues`` overwrites it.

    Returns:
        ``module``.

    Raises:
        PlanError: there are no values.
    """
    tensors = named_tensors(module)
    lacking = [name for name, tensor in tensors.items() if tensor.is_meta]
    if lacking and values is None:
        raise PlanError(
            f"{', '.join(lacking[:5])}{', ...' if len(lacking) > 5 else ''}: on the meta device, "
            "and nothing says which values to start with: call initialise() or "
            "load_checkpoint(path) on the plan before its stages are built"
        )
    if values is not None:
        chosen = {n: t for n, t in tensors.items() if t.is_meta or values.replaces(n)}
        _fill(module, chosen, values)
    return module


@torch.no_grad()
def _fill(module: nn.Module, chosen: Mapping[str, Tensor], values: Values) -> None:
    first: dict[int, str] = {}
    for name, tensor in chosen.items():
        first.setdefault(id(tensor), name)
    found = dict(values(list(first.values())))
    made: dict[int, Tensor] = {}
    for key, name in first.items():
        original = chosen[name]
        if original.is_meta:
            made[key] = alike(torch.empty_like(original, device="cpu"), original)
        # Taken out, so that there is one tensor twice at a time and not all of them.
        made.get(key, original).copy_(found.pop(name))
    for name, original in chosen.items():
        if original.is_meta:
            assign(module, name, made[id(original)])
