"""``SplitFunctions``: F, I, W and B of one captured module as functions of tensors.

``SplitModule`` calls them under autograd, ``Stage`` with explicit state. The functions keep no
tensors. Positions of arguments and results are computed once; a call only moves references.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from autosplit.backends.backend import collecting_new_objects_only
from autosplit.errors import SplitError
from autosplit.passes import Role
from autosplit.runtime.residuals import Residuals, State, StateRecord, own_writes
from autosplit.torch_internals.autograd import is_autocast, without_autocast
from autosplit.torch_internals.gradients import copy_together

from .accumulation import ACCUMULATION
from .accumulators import Accumulators
from .gradient_dependence import NONE_MISSING, Missing
from .input_overlap import refuse_state_overlap
from .module_graphs import ModuleGraphs

_MAX_SPECIALIZED = 3  # sets of outputs without a gradient that get their own graphs
_SENTINELS_PER_END = 2


class ForwardResult(NamedTuple):
    """Results of F.

    Attributes:
        outputs: leaves of the module's result, then new values of inputs that the module writes
            into, in the order of ``SplitFunctions.output_names``.
        updates: new values of buffers that the module writes into, in the order of
            ``SplitFunctions.updated_state``.
        saved: residuals for the backward.
    """

    outputs: list[Any]
    updates: list[Tensor]
    saved: Residuals


class SplitFunctions(ModuleGraphs):
    """F, I, W and B of one captured module. Backward graphs are compiled at their first use.

    ::

        outputs, updates, saved = functions.forward(state, leaves)                    # F
        input_grads, deferred, early = functions.backward_input(saved, output_grads)  # I
        late = functions.backward_weight(deferred)                                    # W
        input_grads, weight_grads = functions.backward(saved, output_grads)           # B = I, W

    Contract:
        - F, I and W are functions: they keep no tensors, and write only into the accumulators that
          they get and, in ``run``, into buffers.
        - Arguments are consumed: the lists ``leaves`` and ``output_grads`` are emptied, and the
          graph takes the values of ``saved`` and ``deferred``. Each value is freed at its last use
          inside a graph.
        - I returns the gradients of all inputs and of ``early_parameters``; W returns those of
          ``late_parameters``. Both together are ``parameter_names``, for all of which B returns
          gradients.
        - A call must fulfil the guards of ``capture``, which ``Specializations`` checks.
          ``for_sizes`` returns the functions for the sizes of a call.

    Terms:
        state: the module's parameters and buffers by name.
        leaves: the flattened ``(args, kwargs)`` of a call.
        tangent: the gradient of an output, an argument of the backward.
        residuals: the values that one graph leaves for the next, see ``Residuals``.
        early, late parameters: parameters whose gradients I, or W, computes.

    Shapes:
        Leaves have the shapes, strides and dtypes of the capture. An output's gradient has the
        shape and dtype of ``tangent_specs``; other strides are copied. Gradients have the shape
        and dtype of their input or parameter.

    Raises:
        SplitError: from the backward calls, if a gradient does not fit its output, if a residual
            was written in place, or if the module was captured without gradients.

    Attributes:
        residuals: the class of the residuals, such as ``Residuals``.
    """

    residuals = Residuals

    def record_state(self, state: State) -> StateRecord:
        """The parameters and buffers that the backward reads, as they are now."""
        return StateRecord(self._saves, tuple(map(state.__getitem__, self._read_state)))

    def run(
        self, state: State, leaves: list[Any], record: StateRecord | None = None
    ) -> ForwardResult:
        """Run F, and write new values of buffers into the tensors of ``state``. If F raises, each
        buffer has its old value, or that of eager mode after the same error.

        Args:
            state: parameters and buffers by name.
            leaves: the flattened ``(args, kwargs)``; emptied.
            record: the result of ``record_state(state)`` from an earlier F, since which the state
                is unchanged; None: it is recorded after F.

        Raises:
            SplitError: an input shares memory with a buffer that the module writes into.
        """
        if is_autocast():
            with without_autocast():
                return SplitFunctions.run(self, state, leaves, record)
        if not self.updated_state:
            return self._run_forward(state, leaves, record)
        values = buffers = [*map(state.__getitem__, self.updated_state)]
        refuse_state_overlap(self, leaves, buffers)
        try:
            result = self._run_forward(state, leaves, record)
            values = result.updates
        finally:  # F may have written buffers before it raised
            with torch.no_grad():
                self._write(buffers, values)
        return result

    def _write(self, buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy new values into buffers, which are in the order of ``updated_state``. Buffers that F
        has written are counted as written, because kernels of batch norms do not count.
        """
        if all(map(is_, buffers, values)):
            increment_version(buffers)
            return
        for part in self._slices_by_dtype:
            copy_together(buffers[part], values[part])

    def forward(self, state: State, leaves: list[Any]) -> ForwardResult:
        """F: run the forward, and return new values of buffers without writing them.

        Args:
            state: parameters and buffers by name.
            leaves: the flattened ``(args, kwargs)``; emptied.
        """
        copies = {name: state[name].clone() for name in self.updated_state}
        return self.run({**state, **copies}, leaves)

    def _run_forward(
        self, state: State, leaves: list[Any], record: StateRecord | None
    ) -> ForwardResult:
        """Run F. An update may be its buffer itself, with the new value."""
        pool = [*map(state.__getitem__, self.forward_state), *leaves]
        leaves.clear()
        results = self._forward(pool)
        outputs = len(self.output_names)
        end = outputs + len(self.updated_state)
        saved = self.residuals(self._saves, results[end:], record or self.record_state(state))
        return ForwardResult(results[:outputs], results[outputs:end], saved)

    def for_gradients(self, output_grads: Sequence[object]) -> tuple[Self, Missing]:
        """The functions for a backward in which some outputs have no gradient.

        The first few sets of missing gradients get specialized graphs. For later sets, and if
        specialized graphs cannot be built, missing gradients are zeros.

        Args:
            output_grads: one gradient for each output; None for a missing one.

        Returns:
            (functions for this backward, the parameters and inputs that get no gradient).
        """
        for _, at in self._tangents:  # written out, because every backward runs it
            if output_grads[at] is None:
                break
        else:
            return self, NONE_MISSING
        missing = self.dependence.missing(output_grads)
        variants = self._specialized
        # Zeros in place of gradients would be written as if they were gradients.
        is_free = self.written or len(variants) < _MAX_SPECIALIZED
        if missing.outputs not in variants and is_free:
            with collecting_new_objects_only():
                variants[missing.outputs] = self._without(missing.outputs)
        functions = variants.get(missing.outputs) or self
        if functions._key != self._key:
            key = self._key
            functions = functions._resized.get(key) or functions._twin(key, self._size)
        return functions, missing

    def backward_input(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Accumulators | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor | None], Residuals, Sequence[Tensor]]:
        """I: compute the gradients of inputs, and keep the deferred tensors for W.

        Args:
            saved: the residuals of F; taken.
            output_grads: gradients in the order of ``output_names``; emptied.
            gradients: accumulators for ``early_parameters``; None: return new tensors.
            dtype: dtype of the accumulators; None for the dtype of each gradient.

        Returns:
            (input gradients in the order of ``capture.inputs``, None for inputs without a gradient;
            residuals for W; gradients of ``early_parameters``, or the accumulators).

        Raises:
            SplitError: a gradient does not fit its output, or a saved tensor was written
                in place since the forward.
        """
        if is_autocast():
            with without_autocast():
                return SplitFunctions.backward_input(self, saved, output_grads, gradients, dtype)
        record, (_, state_positions, layout) = saved.record, self.backward_graphs.deferred_layout
        pool = self._backward_pool(saved.take_arguments(), output_grads)
        results, early = self.backward_graphs.input.run(pool, gradients, dtype)
        count = len(self.capture.inputs)
        if layout not in record.parts:
            weight_state = tuple(map(record.state.__getitem__, state_positions))
            record.parts[layout] = StateRecord(layout, weight_state)
        deferred = self.residuals(layout, results[count:], record.parts[layout])
        return results[:count], deferred, early

    def backward_weight(
        self,
        deferred: Residuals,
        gradients: Accumulators | None = None,
        dtype: torch.dtype | None = None,
    ) -> Sequence[Tensor]:
        """W: compute the gradients of ``late_parameters`` from the deferred tensors.

        Args:
            deferred: the residuals of I; taken.
            gradients: accumulators in the order of ``late_parameters``, each in memory that no
                other argument shares; None: return new tensors.
            dtype: dtype of the accumulators; None for the dtype of each gradient.

        Returns:
            the accumulators, or new tensors in the order of ``late_parameters``. Gradients of
            parameters in ``dependence.borrowed`` may share storage.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        run = self.backward_graphs.weight.run
        if deferred.live:
            run = own_writes(deferred.live)(run)
        return run(deferred.take_arguments(), gradients, dtype)[1]

    def most_joined(self, dtype: torch.dtype | None = None) -> int:
        """The largest number of microbatches that one call of ``joined_weight`` may run; 1 if
        joining gains nothing.

        Args:
            dtype: dtype of the accumulators; None for the dtype of each gradient.
        """
        return self.backward_graphs.most_joined(dtype)

    def joined_weight(
        self,
        deferred: Sequence[Residuals],
        gradients: Accumulators | None = None,
        dtype: torch.dtype | None = None,
    ) -> Sequence[Tensor]:
        """W of several microbatches as one call; returns the sums of their gradients as
        ``backward_weight`` returns gradients.

        Args:
            deferred: the residuals of I of each microbatch, with the same parameters and buffers;
                taken.
            gradients: see ``backward_weight``.
            dtype: see ``backward_weight``.

        Raises:
            SplitError: a deferred tensor was written in place since I.
        """
        pool: list[Any] = []
        for residuals in deferred:
            state = residuals.record.state
            del pool[len(pool) - len(state) :]  # parameters and buffers come once, at the end
            pool += residuals.take_arguments()
        return self.backward_graphs.weight.run(pool, gradients, dtype, len(deferred))[1]

    @cached_property
    def sums_microbatches(self) -> bool:
        """Whether ``sum_weights`` may be used. It may if the gradients of some microbatches may be
        summed first, and their sum added to that of other microbatches.
        """
        return self._accumulation != ACCUMULATION["exact"] and self.dependence.dense

    def sum_weights(self, deferred: Sequence[Residuals]) -> Sequence[Tensor]:
        """The sums of the weight gradients of several microbatches, as new tensors.

        Args:
            deferred: as for ``joined_weight``.
        """
        most, sums = self.most_joined(), None
        for start in range(0, len(deferred), most):
            run = deferred[start : start + most]
            joins = len(run) > 1
            weight = self.joined_weight(run, sums) if joins else self.backward_weight(run[0], sums)
            if sums is None:
                borrowed = [name in self.dependence.borrowed for name in self.late_parameters]
                pairs = zip(weight, borrowed, strict=True)
                sums = Accumulators([grad.clone() if copied else grad for grad, copied in pairs])
        return () if sums is None else sums.tensors

    def backward(
        self,
        saved: Residuals,
        output_grads: list[Tensor | None],
        gradients: Accumulators | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """B: I and W as one graph.

        Arguments are those of ``backward_input``, with accumulators for ``parameter_names``.
        Returns (input gradients, gradients of ``parameter_names`` or the accumulators).

        Raises:
            SplitError: as for ``backward_input``.
        """
        if self.backward_graphs.defers_whole_backward:
            grads, deferred, _ = self.backward_input(saved, output_grads)
            return grads, self.backward_weight(deferred, gradients, dtype)
        run = self.backward_graphs.fused.run
        if saved.live:
            run = own_writes(saved.live)(run)
        return run(self._backward_pool(saved.take_arguments(), output_grads), gradients, dtype)

    def backward_slices(
        self, saved: Residuals, output_grads: list[Tensor | None]
    ) -> Iterator[dict[Role, Any]]:
        """B in slices: the iterator runs one slice for each item, see ``BackwardGraphs.sliced``.

        Arguments and errors are those of ``backward_input``.

        Returns:
            an iterator that yields, for each slice, a dictionary from role to gradient of the
            gradients that the slice completes.
        """
        pool = self._backward_pool(saved.take_arguments(), output_grads)
        graphs = self.backward_graphs
        return graphs.sliced.run(dict(zip(graphs.arguments, pool, strict=True)))

    def _backward_pool(self, saved: list[Tensor], output_grads: list[Tensor | None]) -> list[Any]:
        """The arguments of I or B in one list. The list has the only references to them, so that
        the graph can free each at its last use.
        """
        pool: list[Any] = []
        for name, at in self._tangents:
            grad, spec = output_grads[at], self.tangent_specs[name]
            if (
                grad is None
                or grad.dtype is not spec.dtype
                or (grad.shape, grad.stride()) != (spec.shape, spec.stride)
            ):
                grad = self._tangent(name, grad)
            pool.append(grad)
        output_grads.clear()
        pool += saved
        saved.clear()
        return pool

    def _tangent(self, name: str, grad: Tensor | None) -> Tensor:
        """An output's gradient with the strides of the capture; zeros instead of None.

        Raises:
            SplitError: the gradient has another shape or dtype.
        """
        spec = self.tangent_specs[name]
        if grad is None:
            return spec.zeros()
        if grad.shape != spec.shape or grad.dtype != spec.dtype:
            raise SplitError(
                f"the gradient of {name} must be {spec.dtype} {list(spec.shape)}, "
                f"got {grad.dtype} {list(grad.shape)}; pass a gradient like the output"
            )
        return spec.conform(grad)

    @staticmethod
    def sentinel_parameters(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """A few parameters to pass to F's autograd function as further arguments. The function
        returns no gradients for these arguments, but learns from them whether a backward requests
        gradients of parameters.

        Each argument costs the engine a visit, so only the first and last few parameters are used.
        """
        if len(parameters) <= 2 * _SENTINELS_PER_END:
            return parameters
        return [*parameters[:_SENTINELS_PER_END], *parameters[-_SENTINELS_PER_END:]]
