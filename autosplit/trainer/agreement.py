"""Agreement of ranks, on options and mesh at the start, and on losses and norm in each step."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from autosplit.errors import PipelineError
from autosplit.mesh.dimensions import RankLayout
from autosplit.pipeline.schedule.routes import Wiring
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.default_group import gather
from autosplit.ranks.first_error import Guard
from autosplit.ranks.groups import Groups
from autosplit.text.figures import few

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def difference(
    values: Mapping[K, Mapping[str, T]],
) -> tuple[str, tuple[K, T], tuple[K, T]] | None:
    """Find the first name for which two ranks (or stages) have different values.

    Args:
        values: maps each rank to its values by name. A rank may lack names.

    Returns:
        (name, (first rank, its value), (second rank, its value)); None if there is no difference.
    """
    first: dict[str, tuple[K, T]] = {}
    for rank, named in values.items():
        for name, value in named.items():
            if first.setdefault(name, (rank, value))[1] != value:
                return name, first[name], (rank, value)
    return None


def check_unanimous(arguments: Mapping[str, Any], layout: RankLayout) -> None:
    """Check that all ranks build the same trainer; collective over the default process group.

    Ranks with different trainers would clip differently, or wait for a message that no rank sends.
    A trainer of one rank communicates nothing.

    Args:
        arguments: the trainer's arguments by name; the same names on every rank.
        layout: the layout of the ranks in this rank's mesh.

    Raises:
        PipelineError: names the first difference and the ranks.
    """
    if len(layout.ranks) == 1:
        return
    pipelines = f"{layout.pipelines} at the places {layout.places}"
    texts = {name: _text(value) for name, value in arguments.items()}
    gathered = gather({"the layout of pipelines in the mesh": pipelines, **texts})
    if (differing := difference(dict(enumerate(gathered)))) is not None:
        name, (first_rank, first_text), (rank, text) = differing
        raise PipelineError(
            f"every rank must build the same trainer, but {name} is {first_text} on rank "
            f"{first_rank} and {text} on rank {rank}"
        )


def _text(value: object) -> str:
    """A short text for a value; ranks with equal values get equal texts."""
    if isinstance(value, Schedule):
        order = _digest(value.ranks, value.placement)
        return f"{value.name!r} (split_backward={value.split_backward}, order {order})"
    if isinstance(value, Wiring):
        return f"one of order {_digest(value)}"
    return repr(value)


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


# --- a step ---------------------------------------------------------------------------------------

_ROUNDING = 1e-5
"""Relative tolerance between the losses of ranks that share the tensors of a stage."""


class StepReduction:
    """The one all-reduce that sums losses and gradient norm of a step over all ranks.

    The reduced vector has float64 numbers. Each rank writes its own numbers, and 0 for other ranks'
    numbers:

        losses      one for each pipeline and microbatch, from the rank with the last stage; a
                    pipeline with fewer microbatches than another has zeros behind its own
        parts       one for each named part of the loss, pipeline and microbatch, likewise
        weights     one for each pipeline and microbatch, likewise; only if the step has weights
        batches     one for each pipeline, the sum of ``batch`` over its ranks
        nonfinite   one for each rank: 1 + its last stage with a gradient that is not finite, or 0
        aux         one for each auxiliary loss, the sum over all ranks and microbatches
        squares     one in all, the sum over all ranks; only if the norm is computed
        windows     two for each rank: the start and the end of its recorded actions
        checks      some for each rank: the numbers that the flight recorder compares

    When the sum is complete, every rank has run the step. Pipelines of ranks along "tp", which
    share the tensors of their stages, must have equal losses. Collective: the constructor starts
    the all-reduce.

    Args:
        groups: the trainer's process groups.
        guard: the trainer's guard.
        losses: maps each microbatch to its loss, the loss's parts and its weight; empty on ranks
            without the last stage.
        counts: the number of microbatches of each pipeline.
        end: the rank, within each pipeline, that has the last stage.
        squares: the sum of the squares of this rank's gradients, shape [1]; None without a norm.
        nonfinite: the last of this rank's stages with a gradient that is not finite; None if all
            are finite.
        dtype: the dtype of the losses.
        part_names: the names of the parts, in order.
        weighted: whether the step has weights.
        aux: the sums of this rank's auxiliary losses over its stages and microbatches, by name.
        raises: whether a gradient that is not finite is an error.
        window: (start of this rank's first recorded action, end of its last), in seconds of
            ``time.perf_counter()``; zeros if nothing was recorded.
        batch: a checksum of this rank's microbatches, compared between pipelines that share
            tensors; below 2**40, so that the sum over a pipeline is exact in float64.
        checks: numbers of the flight recorder, as many on each rank; integers below 2**53.
    """

    def __init__(
        self,
        groups: Groups,
        guard: Guard,
        losses: Mapping[int, Sequence[Tensor]],
        *,
        counts: Sequence[int],
        end: int,
        squares: Tensor | None,
        dtype: torch.dtype,
        part_names: Sequence[str] = (),
        weighted: bool = False,
        aux: Mapping[str, float] = MappingProxyType({}),
        nonfinite: int | None = None,
        raises: bool = False,
        window: tuple[float, float] = (0.0, 0.0),
        batch: int = 0,
        checks: Sequence[float] = (),
    ) -> None:
        self._guard, self._raises = guard, raises
        self._dtype, self._part_names, self._weighted = dtype, part_names, weighted
        layout, self._end = groups.layout, end
        count, self._counts = max(counts), counts
        self._losses = len(layout.pipelines) * count
        self._layout = layout
        rows = len(layout.pipelines)
        self._batches = self._losses * (1 + len(part_names) + weighted)
        self._stages = self._batches + rows
        self._aux, self._aux_names = self._stages + groups.everybody.ranks, tuple(aux)
        self._squares = self._aux + len(aux)
        self._windows = self._squares + (squares is not None)
        self._checks = self._windows + 2 * groups.everybody.ranks
        self._check_count = len(checks)
        values = [0.0] * (self._checks + len(checks) * groups.everybody.ranks)
        for row, scalars in enumerate(zip(*losses.values(), strict=True)):
            start = row * self._losses + layout.index * count
            for microbatch, scalar in zip(losses, torch.stack(scalars).tolist(), strict=True):
                values[start + microbatch] = scalar
        values[self._aux : self._squares] = aux.values()
        if squares is not None:
            values[self._squares] = squares.item()
        at = self._windows + 2 * groups.everybody.rank
        values[at : at + 2] = window
        at = self._checks + len(checks) * groups.everybody.rank
        values[at : at + len(checks)] = checks
        values[self._batches + layout.index] = batch
        if nonfinite is not None:
            values[self._stages + groups.everybody.rank] = nonfinite + 1
        self._has_all_losses = len(losses) == sum(counts)
        # Lists: a user may log every step, and an operator of torch takes longer than such a sum.
        self._unreduced = values
        self._reduced: list[float] | None = None  # once this rank has waited for it
        self._sum: Callable[[], Tensor] | None = None
        if groups.everybody.ranks > 1:
            numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
            self._sum = groups.everybody.start_sum(numbers)

    def wait(self) -> Tensor:
        """Wait until all ranks have run the step, and return its losses.

        Returns:
            The loss of each microbatch, shape [M], on the CPU.

        Raises:
            RankError: a rank failed in the step.
            PipelineError: ranks that share the tensors of a stage have different losses. Or a
                gradient is not finite, and ``raises`` is set.
        """
        with self._guard.during("the end of a step"):
            numbers = self._receive()
            if len(self._layout.pipelines) > 1:
                self._check_shared(
                    torch.tensor(self._by_pipeline(numbers), dtype=torch.float64, device="cpu"),
                    numbers[self._batches : self._stages],
                )
            self._check_finite(numbers)
        index = self._layout.index
        losses = self._by_pipeline(numbers)[index][: self._counts[index]]
        return torch.tensor(losses, dtype=self._dtype, device="cpu")

    def _by_pipeline(self, numbers: list[float]) -> list[list[float]]:
        """The losses of each pipeline, with zeros for microbatches that only others have."""
        count = max(self._counts)
        return [numbers[at : at + count] for at in range(0, self._losses, count)]

    def means(self) -> dict[str, float]:
        """Return the mean ``"loss"`` and the means of its named parts over the microbatches of all
        pipelines, weighted by the microbatches' weights. Means of auxiliary losses are not
        weighted. Waits as ``wait`` does.
        """
        numbers, count, total = self._await_reduced(), self._losses, sum(self._counts)
        if self._batches == count and not self._aux_names:  # neither weights nor parts
            return {"loss": sum(numbers[:count]) / total}
        rows = [numbers[at : at + count] for at in range(0, self._batches, count)]
        if self._weighted:
            weights = rows.pop()
            products = [map(operator.mul, row, weights) for row in rows]
            means = [sum(row) / sum(weights) for row in products]
        else:
            means = [sum(row) / total for row in rows]
        means += [number / total for number in numbers[self._aux : self._squares]]
        return dict(zip(("loss", *self._part_names, *self._aux_names), means, strict=True))

    def _check_shared(self, losses: Tensor, batches: list[float]) -> None:
        """Check that pipelines that share tensors had one batch and have equal losses.

        Raises:
            PipelineError: names the ranks.
        """
        rows: dict[tuple[int, ...], int] = {}
        precision = max(_ROUNDING, 4 * torch.finfo(self._dtype).eps)
        for row, place in enumerate(self._layout.places):
            first = rows.setdefault(place.share, row)
            if batches[first] != batches[row]:
                one, other = self._layout.pipelines[first], self._layout.pipelines[row]
                raise PipelineError(
                    f"the ranks {list(one)} and {list(other)} share the tensors of their stages "
                    "and got different batches: pass the same batch on all ranks along 'tp'; only "
                    "ranks along other dimensions of the mesh have different shares of it"
                )
            if not torch.allclose(
                losses[first], losses[row], rtol=precision, atol=0.0, equal_nan=True
            ):
                ends = [self._layout.pipelines[number][-1] for number in (first, row)]
                raise PipelineError(
                    f"the ranks {ends[0]} and {ends[1]} share the tensors of a stage and have the "
                    f"losses {losses[first].tolist()} and {losses[row].tolist()}, which must be "
                    "equal: pass the same batch on all ranks along 'tp', and compute the loss "
                    "from whole outputs, or under loss_parallel()"
                )

    def bounds(self) -> tuple[float, float]:
        """Return (first start, last end) of the actions that this pipeline recorded, in seconds.

        Both are zero if nothing was recorded. Waits as ``wait`` does.
        """
        numbers = self._await_reduced()[self._windows : self._checks]
        rows = [*zip(numbers[::2], numbers[1::2], strict=True)]
        windows = [rows[rank] for rank in self._layout.pipeline if rows[rank] != (0.0, 0.0)]
        starts, ends = zip(*windows, strict=True) if windows else ([0.0], [0.0])
        return min(starts), max(ends)

    def checks(self) -> list[list[float]]:
        """Return the ``checks`` of each rank; waits as ``wait`` does."""
        numbers, count = self._await_reduced(), self._check_count
        return [numbers[at : at + count] for at in range(self._checks, len(numbers), count)]

    def norm(self) -> float:
        """Return the norm of the model's gradient; waits as ``wait`` does."""
        return math.sqrt(self._await_reduced()[self._squares])

    def check_local(self) -> None:
        """Check that this rank's gradients are finite, without waiting for other ranks.

        Raises:
            PipelineError: a gradient is not finite, and ``raises`` is set.
        """
        with self._guard.during("the end of a step"):
            self._check_finite(self._unreduced)

    @property
    def finite(self) -> bool:
        """Whether all gradients of the step are finite, on all ranks; waits as ``wait`` does."""
        return not any(self._await_reduced()[self._stages : self._aux])

    def _await_reduced(self) -> list[float]:
        """Return the reduced vector. Only the first call waits for the other ranks."""
        if self._reduced is None:
            with self._guard.during("the end of a step"):
                return self._receive()
        return self._reduced

    def _receive(self) -> list[float]:
        """Wait for the reduced vector, and drop the collective's handle. The handle keeps
        connections open, so other ranks could not see that this rank has closed its trainer.
        """
        if self._reduced is None:
            self._reduced = self._unreduced if self._sum is None else self._sum().tolist()
            self._sum = None
        return self._reduced

    def _check_finite(self, numbers: list[float]) -> None:
        codes = numbers[self._stages : self._aux]
        if not self._raises or not any(codes):
            return
        nonfinite = sorted(
            ((int(code) - 1, rank) for rank, code in enumerate(codes) if code), reverse=True
        )
        stages = [f"stage {stage} (rank {rank})" for stage, rank in nonfinite]
        averaged = ", after averaging over replicas" if len(self._layout.pipelines) > 1 else ""
        has_recorder = self._check_count > 0
        advice = (
            ""
            if has_recorder
            else ". RunOptions(recorder=autosplit.Recorder(folder)) writes the step, in which "
            "`autosplit replay` finds the operator and the sample"
        )
        raise PipelineError(
            f"gradients are not finite in {few(stages, 4)}{averaged}{self._causes(numbers)}. No "
            "optimizer has used them. RunOptions(nonfinite='skip') drops the gradients of such a "
            f"step and continues with the next; 'ignore' lets optimizers use them{advice}"
        )

    def _causes(self, numbers: list[float]) -> str:
        """Return a clause for the error about gradients that are not finite. It names the losses
        that are infinite or NaN, or says that all losses are finite. Empty if this rank knows only
        some losses and they are finite.

        Args:
            numbers: the vector of the step, reduced or this rank's, as ``StepReduction`` describes
                it.
        """
        bad_losses = [
            f"{loss} for microbatch {microbatch} (rank {ranks[self._end]})"
            for ranks, losses in zip(
                self._layout.pipelines, self._by_pipeline(numbers), strict=True
            )
            for microbatch, loss in enumerate(losses)
            if not math.isfinite(loss)
        ]
        is_known = numbers is not self._unreduced or self._has_all_losses
        if not (bad_losses or is_known):
            return ""
        return f", and the loss is {few(bad_losses, 4) or 'finite for all microbatches'}"
