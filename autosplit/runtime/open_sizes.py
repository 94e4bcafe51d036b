"""``OpenSizes`` decides which sizes of its inputs the capture of a module leaves open."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import FirstCallError, ShardedError
from autosplit.runtime.build import Dimensions
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.options import SplitOptions

_LONGEST = 600  # characters of a reason
_SPECIAL = (0, 1)  # sizes that are never left open: dimensions without elements, or that broadcast


class OpenSizes:
    """Decides which sizes of inputs become symbols in a capture: the sizes that differed between
    earlier calls of the module.

    Args:
        options: how the module is split. All sizes are fixed with a compiling backend, and with a
            memory budget.
    """

    def __init__(self, options: SplitOptions) -> None:
        # A budget is met for one combination of sizes. Inductor adds assumptions about sizes while
        # it compiles, for W and later variants after the guards are frozen.
        self._can_leave_open = options.backend == "eager" and isinstance(options.memory, str)
        self._seen: dict[Hashable, list[set[int]]] = {}
        self._refused: dict[Hashable, str] = {}

    def capture_graphs(
        self,
        structure: Hashable,
        leaves: Sequence[Any],
        make: Callable[[Dimensions], SplitFunctions],
        fits: Callable[[SplitFunctions], bool],
    ) -> SplitFunctions:
        """Capture graphs for a call. Sizes that have varied become symbols, if such a capture
        succeeds.

        Args:
            structure: the structure of the call's inputs.
            leaves: the call's flattened inputs.
            make: a function that captures graphs, with symbolic sizes for the dimensions that it is
                passed.
            fits: returns whether the guards of captured graphs hold for the call.

        Raises:
            AutosplitError: any error that ``make`` raises without symbolic sizes.
        """
        varying, reason = self.of(structure, leaves), ""
        if varying:
            try:
                functions = make(varying)
            except (FirstCallError, ShardedError):
                raise
            except Exception as error:  # also torch's own: a graph with fixed sizes may succeed
                reason = f"{type(error).__name__}: {error}"
            else:
                if fits(functions):
                    return functions
                reason = "the graph does not fit the call it was captured for"
        functions = make({})
        if reason:  # the sizes are at fault, not the call
            self._refuse(structure, reason)
        return functions

    def of(self, structure: Hashable, leaves: Sequence[Any]) -> Dimensions:
        """Record the sizes of these inputs. Return the dimensions whose sizes have varied, by input
        position.
        """
        varying = {
            at: self._varying((structure, at, leaf.dim()), leaf)
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        }
        if not self._can_leave_open or structure in self._refused:
            return {}
        return {at: dimensions for at, dimensions in varying.items() if dimensions}

    def _refuse(self, structure: Hashable, reason: str) -> None:
        """Make all sizes constants in later calls whose inputs have this structure (pytree)."""
        self._refused[structure] = " ".join(reason.split())[:_LONGEST]

    @property
    def refusals(self) -> tuple[str, ...]:
        """The reasons why captures with symbolic sizes failed, each once."""
        return tuple(dict.fromkeys(self._refused.values()))

    def _varying(self, key: Hashable, leaf: Tensor) -> frozenset[int]:
        """Record a leaf's sizes, and return its dimensions with more than one size so far."""
        sizes = self._seen.setdefault(key, [set() for _ in leaf.shape])
        for sizes_so_far, size in zip(sizes, leaf.shape, strict=True):
            sizes_so_far.add(size)
        return frozenset(
            at for at, size in enumerate(leaf.shape) if size not in _SPECIAL and len(sizes[at]) > 1
        )
