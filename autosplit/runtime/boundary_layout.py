"""``BoundaryLayout``: static facts about the tensors that one graph leaves for the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from autosplit.device import has_accelerator
from autosplit.passes.lowering import codegen


class Constants(NamedTuple):
    """Tensors of the module that are neither parameters nor buffers, and that graphs refer to.

    Attributes:
        names: for each tensor, the expression by which the module's forward reads it.
        tensors: the module's own tensors, not copies, so that graphs see writes into them.
    """

    names: tuple[str, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls, modules: Iterable[fx.GraphModule], name_of: Callable[[Tensor], str | None]
    ) -> Constants:
        """The constants that the graphs read.

        Args:
            modules: the graphs.
            name_of: returns the expression by which the forward reads a tensor; None for a tensor
                that tracing created.
        """
        attributes = {k: v for module in modules for k, v in codegen.constants(module).items()}
        tensors = {k: v for k, v in attributes.items() if isinstance(v, Tensor)}
        names = [name_of(tensor) or target for target, tensor in tensors.items()]
        return cls(tuple(names), tuple(tensors.values()))


@dataclasses.dataclass(eq=False)
class BoundaryLayout:
    """Static facts about a boundary between two graphs, computed once for all microbatches.

    Attributes:
        names: names of the residual tensors, then of the state that the next graph reads.
        constants: constants that the next graph or a later graph reads.
        exposed: positions of tensors that code outside of the graphs can write into.
        donated: positions of tensors that the next graph may overwrite.
        before_weight: whether the boundary is the one between I and W.
        live: positions in the state of buffers that backward graphs write. The next graph reads
            their present value.
        advice: a further remedy for writes into state, by name of the state, as text for errors.
    """

    names: tuple[str, ...]
    constants: Constants = Constants()  # noqa: RUF009 (immutable)
    exposed: Sequence[int] = ()
    donated: Sequence[int] = ()
    before_weight: bool = False
    live: Collection[int] = ()
    advice: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.on_streams = has_accelerator()

    def protected_names(self, tensors: int) -> Sequence[str]:
        """Names of all values that must not be written: exposed residuals, then state and
        constants. ``tensors`` is the number of residuals, whose names come first in ``names``.
        """
        fixed = self.protected(self.names[tensors:]) + self.constants.names
        return [*(self.names[at] for at in self.exposed), *fixed]

    def protected(self, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """The entries of ``state`` whose tensors no backward graph writes."""
        return tuple([value for at, value in enumerate(state) if at not in self.live])

    @property
    def interval(self) -> str:
        """The two calls between which nothing may be written, as text for errors."""
        if self.before_weight:
            return "backward() and backward_weight()"
        return "the forward and its backward"

    @property
    def remedy(self) -> str:
        """The call after which the saved or deferred tensors may be written, as text for errors."""
        return "Call backward_weight()" if self.before_weight else "Run the backward"
