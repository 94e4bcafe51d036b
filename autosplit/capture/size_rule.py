"""``SizeRule``: the sizes of a graph's outputs, as expressions of the sizes of its inputs.

A rule is plain text, so that ranks can send it to each other: each rank then knows the sizes of all
messages of a microbatch from the sizes of its inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

Leaf: TypeAlias = "tuple[int, ...] | str"
"""The sizes of an input that is a tensor, or the text of a number."""

SizeFunction: TypeAlias = "Callable[[Sequence[Leaf]], tuple[tuple[int, ...], ...] | None]"
"""The sizes of a graph's inputs -> those of its outputs; None if the graph is not valid for them.
"""


def leaf_text(leaf: object) -> str:
    """The text of an input that is no tensor: of a number or a string, its value; of another
    object, the name of its class.
    """
    return repr(leaf) if isinstance(leaf, int | float | complex | str) else type(leaf).__name__


@dataclass(frozen=True)
class SizeRule:
    """The sizes of a graph's outputs for inputs of any sizes for which the graph is valid.

    Attributes:
        places: symbol -> the input and the dimension whose size it is.
        inputs: for each input, the expressions of its sizes, or the text of a number; None for an
            input that the graph does not read.
        conditions: expressions that are true of all sizes for which the graph is valid.
        outputs: for each output, the expressions of its sizes.
    """

    places: tuple[tuple[str, int, int], ...]
    inputs: tuple[tuple[str, ...] | str | None, ...]
    conditions: tuple[str, ...]
    outputs: tuple[tuple[str, ...], ...]

    @classmethod
    def fixed(cls, inputs: Sequence[Leaf | None], outputs: Sequence[Sequence[int]]) -> SizeRule:
        """The rule of a graph that is valid for one combination of sizes; None for an input that
        the graph does not read.
        """
        texts = tuple(
            leaf if leaf is None or isinstance(leaf, str) else tuple(map(str, leaf))
            for leaf in inputs
        )
        return cls((), texts, (), tuple(tuple(map(str, shape)) for shape in outputs))

    def as_function(self) -> SizeFunction:
        """The rule as a function from the sizes of the inputs to those of the outputs."""
        names = ", ".join(name for name, *_ in self.places)
        values = ", ".join(f"inputs[{at}][{dimension}]" for _, at, dimension in self.places)
        misfits = [f"len(inputs) != {len(self.inputs)}"] + [
            f"isinstance(inputs[{at}], str) or len(inputs[{at}]) <= {dimension}"
            for _, at, dimension in self.places
        ]
        checks = [
            f"inputs[{at}] == {leaf!r}"
            if isinstance(leaf, str)
            else f"inputs[{at}] == {_row(leaf)}"
            for at, leaf in enumerate(self.inputs)
            if leaf is not None
        ]
        checks += [f"({condition})" for condition in self.conditions]
        outputs = _row([_row(shape) for shape in self.outputs])
        rule = f"lambda {names}: {outputs} if {' and '.join(checks) or True} else None"
        text = f"lambda inputs: None if {' or '.join(misfits)} else ({rule})({values})"
        evaluate: SizeFunction = eval(text, {"math": __import__("math")})
        return evaluate

    @cached_property
    def _compiled(self) -> SizeFunction:
        return self.as_function()

    def output_sizes(self, inputs: Sequence[Leaf]) -> tuple[tuple[int, ...], ...] | None:
        """The sizes of each output; None if the graph is not valid for these inputs."""
        return self._compiled(inputs)

    def __getstate__(self) -> dict[str, Any]:
        """The rule without its compiled function, which cannot be pickled."""
        return {key: value for key, value in vars(self).items() if key != "_compiled"}


def _row(texts: Sequence[str]) -> str:
    """The text of a tuple of expressions."""
    return f"({''.join(f'{text}, ' for text in texts)})"
