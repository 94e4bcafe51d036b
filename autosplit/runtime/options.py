"""``SplitOptions``: how a module is split and how its graphs run, in one place for all callers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

import torch

from autosplit.backends.backend import check_backend
from autosplit.errors import SplitError
from autosplit.passes import PASSES, CollectiveCosts, Memory, Pass, PassError, memory_setting

from .accumulation import Accumulation


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """How a module is split, and how its graphs run.

    ``split``, ``Stage``, ``SplitPipelineStage`` and ``StageOptions`` accept ``options=``, and each
    field by name. A field passed by name replaces that of ``options``::

        lean = autosplit.SplitOptions(backend="inductor", memory="lean")
        model = autosplit.split(model, options=lean)
        model = autosplit.split(model, backend="inductor", memory="lean")  # the same

    Attributes:
        backend: how graphs run. ``"eager"`` runs operator by operator; results equal plain autograd
            bit for bit where the same kernels run. ``"inductor"`` compiles graphs as
            ``torch.compile`` does: faster, with other rounding, and other random numbers for the
            same seed. Compiled code is cached on disk by torch.
        mode: the mode of ``torch.compile`` in which ``"inductor"`` compiles: ``"default"``, or
            ``"max-autotune"``, which tries several kernels for each product. Both run without CUDA
            graphs, which would write over results of pending microbatches; ``"reduce-overhead"`` is
            therefore refused.
        memory: memory per microbatch, traded for time:

            - ``"fast"``: no operator runs twice.
            - ``"balanced"``: cheap operators are recomputed if that saves memory, for up to 2% of
              the step's time. All weight gradients are deferred to W.
            - ``"lean"``: like ``"balanced"``, but I computes the weight gradients that free the
              most bytes per FLOP; at least 55% of the FLOPs remain for W.
            - a number: the most bytes of deferred tensors per microbatch, between I and W. Tensors
              that F saves, parameters and gradients do not count.

            Models with graph breaks, which are split graph by graph, support ``"balanced"`` only.
        grad_dtype: dtype of the sums of weight gradients; None: the dtype of each gradient.
            ``torch.float32`` sums bfloat16 gradients without rounding; the sum is rounded once, to
            the parameter's ``grad_dtype``. For stages only: ``split`` refuses it, because autograd
            adds into ``.grad``.
        defer_whole_backward: has an effect only if no input needs a gradient. True: W is the whole
            backward and I computes nothing, as no other stage waits for that I. False: I computes
            the derivatives down to the earliest parameters. None: True for stages of a pipeline,
            unless ``weights="2bp"``; False for ``split`` and ``Stage``.
        overlap: costs of tensor parallelism's collectives, from ``measure_collectives``; None:
            estimated costs. While I waits for a collective, it computes the weight gradients that
            fit into the wait. Must be equal on all ranks.
        accumulation: how weight gradients of microbatches are added, see docs/memory.md:

            - ``"exact"``: each product is computed and then added, with the bits of autograd.
            - ``"fused"``: products add into the sums, which saves a pass over each gradient.
            - ``"joined"``: products and convolutions with few rows a microbatch run once for all
              microbatches whose Ws follow each other directly.
            - ``"auto"``: products and convolutions with few rows are joined, other products fused.
            - a number: as ``"auto"``, with this number of rows as the most that are joined.

            All but ``"exact"`` round differently. Hooks of ``register_hook`` see the gradient of
            each microbatch, so a stage with such a hook adds as ``"exact"`` does.
        passes: the passes that split the joint graph, in order; ``autosplit.passes.PASSES`` with
            passes of your own, such as ``(*PASSES, mine)``. Must be equal on all ranks.

    Raises:
        SplitError: an unknown backend, mode, memory or accumulation setting (lists the known ones),
            a ``grad_dtype`` that is not floating-point, or ``passes`` that are not a tuple of
            ``Pass``.
    """

    backend: str = "eager"
    mode: str = "default"
    memory: str | int = "balanced"
    grad_dtype: torch.dtype | None = None
    defer_whole_backward: bool | None = None
    overlap: CollectiveCosts | None = None
    accumulation: str | int = "exact"
    passes: tuple[Pass, ...] = PASSES

    def __post_init__(self) -> None:
        check_backend(self.backend, self.mode)
        dtype = self.grad_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise SplitError(
                f"grad_dtype must be a floating-point dtype such as torch.float32, got {dtype!r}"
            )
        Accumulation.named(self.accumulation)
        try:
            memory_setting(self.memory)
        except PassError as error:
            raise SplitError(str(error)) from None
        is_tuple = isinstance(self.passes, tuple)
        if not (is_tuple and all(isinstance(entry, Pass) for entry in self.passes)):
            raise SplitError(
                "passes must be a tuple of autosplit.passes.Pass, such as "
                f'(*PASSES, Pass("name", function)); got {self.passes!r}'
            )

    @property
    def memory_policy(self) -> Memory:
        """The memory setting for the passes."""
        defers = bool(self.defer_whole_backward)
        return memory_setting(self.memory, defer_whole_backward=defers, collectives=self.overlap)

    def without_joins(self) -> SplitOptions:
        """The same options without joined products. Each W is then one call, and frees its tensors
        when it ends.
        """
        fuses = Accumulation.named(self.accumulation).fuses
        return replace(self, accumulation="fused" if fuses else "exact")

    def in_pipeline(self, *, defers: bool = True) -> SplitOptions:
        """The options of a pipeline's stage: ``defer_whole_backward`` is ``defers``, unless the
        user chose it.
        """
        if self.defer_whole_backward is not None:
            return self
        return replace(self, defer_whole_backward=defers)


class SplitArguments(TypedDict, total=False):
    """The fields of ``SplitOptions`` as keyword arguments, so that editors and type checkers know
    them in signatures. A test checks that the fields are those of ``SplitOptions``.
    """

    backend: str
    mode: str
    memory: str | int
    grad_dtype: torch.dtype | None
    defer_whole_backward: bool | None
    overlap: CollectiveCosts | None
    accumulation: str | int
    passes: tuple[Pass, ...]


OPTION_NAMES = frozenset(field.name for field in fields(SplitOptions))


def split_options(
    options: SplitOptions | None, changes: Mapping[str, Any], call_names: Sequence[str] = ()
) -> SplitOptions:
    """The options of a call that accepts ``options`` and fields by name.

    Args:
        options: the options as a whole; None: the defaults.
        changes: fields by name; they replace the fields of ``options``.
        call_names: names of the call's further options, for the message.

    Raises:
        TypeError: an unknown name, as from any Python function; lists the known ones.
        SplitError: a wrong value, see ``SplitOptions``.
    """
    if unknown := changes.keys() - OPTION_NAMES:
        names = ", ".join(sorted([*OPTION_NAMES, *call_names]))
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}; known options: {names}")
    if not isinstance(options, SplitOptions | None):
        raise SplitError(
            f"options must be a SplitOptions; got a {type(options).__name__}. Pass single options "
            "by name, such as backend='inductor'"
        )
    return replace(options or SplitOptions(), **changes)
