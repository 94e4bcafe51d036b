"""Checkpoint values for the stages of a meta-device model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from autosplit.checkpoint.naming import Naming, check_kinds, check_mismatches, source
from autosplit.checkpoint.storage.formats import open_checkpoint

from .initialise import Init, Initialiser


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
        self.mismatches = tuple(self._naming.mismatches(self._reader.shapes))
        check_mismatches(self.mismatches, path, strict=strict)
        wanted = ((source(e, self._reader.shapes), e.dtype) for e in self._naming.entries)
        check_kinds(((n, d) for n, d in wanted if n is not None), self._reader.kinds, path)

    def replaces(self, name: str) -> bool:
        """Whether the checkpoint has what the model calls ``name``."""
        entry = self._naming.own.get((0, name))
        return entry is not None and source(entry, self._reader.shapes) is not None

    def __call__(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The values of the parameters and buffers ``names``, on the CPU.

        Raises:
            PlanError: nothing gives one of them a value.
            CheckpointError: what has them is damaged.
        """
        entries = {n: self._naming.own[0, n] for n in names if self.replaces(n)}
        sources = {n: source(entry, self._reader.shapes) or "" for n, entry in entries.items()}
        self._reader.verify(dict.fromkeys(sources.values()))
        read = self._reader.read(dict.fromkeys(sources.values()))
        values = {name: read[there] for name, there in sources.items()}
        if lacking := [name for name in names if name not in entries]:
            values |= self._initialiser(lacking)
        return values
