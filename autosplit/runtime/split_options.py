"""How a module is split and its graphs are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autosplit.backends.backend import Backend
from autosplit.backends.eager import Eager
from autosplit.errors import SplitError
from autosplit.passes import CollectiveCosts, Memory, PassError, memory_setting


def _inductor() -> Backend:
    from autosplit.backends.inductor import Inductor  # torch's compiler takes seconds to import

    return Inductor()


BACKENDS: Mapping[str, Callable[[], Backend]] = {"eager": Eager, "inductor": _inductor}


def backend_named(name: str) -> Backend:
    """A backend of ``BACKENDS``, for one traced module."""
    return BACKENDS[name]()


def check_backend(name: str) -> None:
    """Raises:
    SplitError: the backend is unknown; lists the known ones.
    """
    if name not in BACKENDS:
        known = ", ".join(map(repr, BACKENDS))
        raise SplitError(f"unknown backend {name!r}; known backends: {known}")


@dataclass(frozen=True)
class SplitOptions:
    """What the passes and the backend are told; ``autosplit.split`` says what each means.

    Attributes:
        backend: how graphs are run.
        memory: what one microbatch holds, a setting or a budget in bytes.
        late_input: whether W does the whole backward where no input needs a gradient, see
            ``autosplit.Stage``.
        overlap: what collectives take; None goes by an estimate.

    Raises:
        SplitError: an unknown backend or memory setting; lists the known ones.
    """

    backend: str = "eager"
    memory: str | int = "balanced"
    late_input: bool = False
    overlap: CollectiveCosts | None = None

    def __post_init__(self) -> None:
        check_backend(self.backend)
        try:
            memory_setting(self.memory, collectives=self.overlap)
        except PassError as error:
            raise SplitError(str(error)) from None

    @property
    def holds_open_sizes(self) -> bool:
        """Whether one graph may hold for many sizes of inputs. Inductor assumes more about sizes
        while it compiles, W and later variants behind the guards.
        """
        return self.backend == "eager"

    @property
    def memory_policy(self) -> Memory:
        """The memory setting as the passes take it."""
        return memory_setting(self.memory, late_input=self.late_input, collectives=self.overlap)
