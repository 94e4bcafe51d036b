"""``MicrobatchState``: the tensors of one microbatch between two of its graphs.

Phases of one microbatch's state, and the actions between them::

    F ──► saved ──────────────► I ──► deferred ──► W     split backward
    F ──► saved ──────────────► B                        fused backward
    F ──► inputs only ── R ──► saved ──► I or B          recompute (R runs F again)

    saved and deferred may be offloaded in between, storage by storage
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from autosplit.device import GeneratorStates
from autosplit.errors import SplitError, with_code
from autosplit.runtime.accumulators import CompletionReport
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import GradientSums
from autosplit.torch_internals.autograd import WithoutAutograd, checks_nan, has_tensor_hooks

from .boundary_layout import BoundaryLayout
from .residuals import Residuals, State, StateRecord

_ORDERS = {
    "forward": (
        "stage.backward_input(0, [output_grad])",
        "stage.forward(0, [x])\nstage.backward_input(0, [output_grad])",
    ),
    "backward_input": (
        "stage.forward(0, [x])\nstage.backward_weight(0)",
        "stage.forward(0, [x])\nstage.backward_input(0, [output_grad])\nstage.backward_weight(0)",
    ),
}
"""Calls of a stage by the call that a microbatch has not run: in the wrong order, and in the right
one."""


class MicrobatchState(NamedTuple):
    """The tensors that a stage holds for one microbatch between two of its graphs.

    Attributes:
        functions: the graphs that the microbatch runs.
        residuals: the values that the first graph left for the second. After R, they are those of
            R's run of F.
        module_state: the parameters and buffers that F read.
        skipped: names of parameters that get no gradient from this microbatch.
    """

    functions: SplitFunctions
    residuals: Residuals
    module_state: State
    skipped: frozenset[str] = frozenset()


class InFlightMicrobatches(dict[int, MicrobatchState]):
    """The states of a stage's microbatches in one phase, by microbatch number.

    Args:
        owner: the stage's name, for messages.
        producer: the call that puts a microbatch into this phase, for messages.

    Raises:
        SplitError: from ``[]``, if the microbatch is not in this phase.
    """

    def __init__(self, owner: str, producer: str) -> None:
        self._owner = owner
        self._producer = producer

    @property
    def tensors(self) -> list[Tensor]:
        """The residual tensors of all microbatches in this phase, without parameters and
        buffers.
        """
        return [t for state in self.values() for t in state.residuals.tensors]

    def remove_state(self, microbatch: int) -> MicrobatchState:
        """Remove and return a microbatch's state.

        Raises:
            SplitError: the microbatch is not in this phase, or some of its storages are detached.
        """
        state = self[microbatch]
        if state.residuals.detached:
            raise SplitError(
                f"{self._owner}: tensors of microbatch {microbatch} are detached; call "
                "attach_held() with the list that detach_held() returned, and then run it"
            )
        del self[microbatch]
        return state

    def __missing__(self, microbatch: int) -> NoReturn:
        message = (
            f"{self._owner}: microbatch {microbatch} has not run {self._producer}, or its "
            "result was used already"
        )
        if self._producer in _ORDERS:
            wrong, right = _ORDERS[self._producer]
            message = with_code(message, wrong=wrong, right=right)
        raise SplitError(message)


class StageBackward:
    """I, W and B of a stage's microbatches, with the sums of their weight gradients.

    Args:
        owner: the stage's name, for messages.
        dtype: the dtype of the sums; None for the dtype of each gradient.

    Attributes:
        in_flight: the microbatches between I and W.
        sums: the weight gradients, summed over the microbatches that have run W or B.
        last: (number of the microbatch whose W or B is the last of a step, report to call as
            gradients are complete); None if no caller needs a report.
    """

    last: tuple[int, CompletionReport] | None = None

    def __init__(self, owner: str, dtype: torch.dtype | None = None) -> None:
        self.in_flight = InFlightMicrobatches(owner, "backward_input")
        self.sums = GradientSums(owner, dtype)
        self._owner = owner

    def backward_input(
        self, microbatch: int, state: MicrobatchState, grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Run I of a microbatch, and return the gradients of its inputs.

        Args:
            microbatch: the number of the microbatch.
            state: the tensors that the stage holds for the microbatch after F.
            grads: one gradient for each output; emptied.

        Raises:
            SplitError: see ``Residuals.take_arguments`` and ``GradientSums.into``.
        """
        functions, saved, module_state, _ = state
        functions, (skipped, idle, _) = functions.for_gradients(grads)
        names, sums = functions.early_parameters, self.sums
        into = sums.into(names, module_state, skipped) if names else None
        input_grads, deferred, early = functions.backward_input(saved, grads, into, sums.dtype)
        if names and into is None:
            sums.add_gradients(names, early, functions.dependence.borrowed, skipped)
        for at in idle:  # autograd distinguishes no gradient from a gradient of zeros
            input_grads[at] = None
        self.in_flight[microbatch] = MicrobatchState(functions, deferred, module_state, skipped)
        return input_grads

    def backward(
        self, microbatch: int, state: MicrobatchState, grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Run B of a microbatch: I and W as one graph. Arguments, result and errors are those of
        ``backward_input``.
        """
        functions, saved, module_state, _ = state
        functions, (skipped, idle, _) = functions.for_gradients(grads)
        names, sums = functions.parameter_names, self.sums
        into = sums.into(names, module_state, skipped)
        if into is not None and self.last is not None:
            into = into._replace(report=self.report_of(microbatch))
        input_grads, gradients = functions.backward(saved, grads, into, sums.dtype)
        if into is None:
            sums.add_gradients(names, gradients, functions.dependence.borrowed, skipped)
        for at in idle:
            input_grads[at] = None
        return input_grads

    def backward_weight(self, microbatch: int, *later: int) -> None:
        """Run W of microbatches, and add their weight gradients to ``sums``. If the options join
        products, products with few rows run once for several microbatches.

        Raises:
            SplitError: a microbatch is not between I and W, or a parameter was replaced since an
                earlier microbatch.
        """
        runs = [[self.in_flight.remove_state(microbatch)]]
        for number in later:
            state = self.in_flight.remove_state(number)
            if self._joins(runs[-1], state):
                runs[-1].append(state)
            else:
                runs.append([state])
        for run in runs:
            functions, deferred, module_state, skipped = run[0]
            if not functions.has_backward:
                continue
            names, sums = functions.late_parameters, self.sums
            into = sums.into(names, module_state, skipped)
            if into is not None and self.last is not None and run is runs[-1]:
                into = into._replace(report=self.report_of((microbatch, *later)[-1]))
            if len(run) == 1:
                gradients = functions.backward_weight(deferred, into, sums.dtype)
            else:
                residuals = [state.residuals for state in run]
                gradients = functions.joined_weight(residuals, into, sums.dtype)
            if into is None:
                sums.add_gradients(names, gradients, functions.dependence.borrowed, skipped)

    def _joins(self, run: Sequence[MicrobatchState], state: MicrobatchState) -> bool:
        """Whether W of the microbatch ``state`` may run in one call with the microbatches of
        ``run``.
        """
        functions, first = state.functions, run[0]
        if functions is not first.functions or len(run) >= functions.most_joined(self.sums.dtype):
            return False
        if state.skipped or first.skipped or checks_nan():
            return False
        parameters = [state.module_state[name] for name in functions.late_parameters]
        same_state = all(map(is_, state.residuals.record.state, first.residuals.record.state))
        return same_state and not has_tensor_hooks(parameters)

    def report_end(self, microbatch: int) -> None:
        """Report all sums as complete, if this microbatch is the last of a step."""
        if (report := self.report_of(microbatch)) is not None:
            report.report_all()

    def report_of(self, microbatch: int) -> CompletionReport | None:
        """The report of ``last``, if this microbatch is the last of the step; else None."""
        return self.last[1] if self.last is not None and self.last[0] == microbatch else None

    def clear(self) -> None:
        """Drop the microbatches between I and W, and the sums."""
        self.in_flight.clear()
        self.sums.clear()


class RecomputableState:
    """The state of a microbatch that keeps only F's inputs, from which F runs again.

    The second F has the same results, bit for bit. Create the object before the first F, because it
    copies the buffers that F writes and the states of random generators. Everything else that F
    reads must not change until F runs again.

    Args:
        functions: the graphs of the microbatch.
        module_state: the module's parameters and buffers.
        inputs: the microbatch's inputs.
    """

    def __init__(
        self, functions: SplitFunctions, module_state: State, inputs: list[Tensor]
    ) -> None:
        self.functions = functions
        self.module_state = module_state
        self._buffers = {name: module_state[name].clone() for name in functions.updated_state}
        steady = [name for name in functions.forward_state if name not in self._buffers]
        names = (*functions.capture.inputs, *steady)
        read = tuple([module_state[name] for name in steady])
        layout = BoundaryLayout(names, functions.forward_constants, range(len(inputs)))
        self._inputs = Residuals(layout, list(inputs), StateRecord(layout, read))
        self._generators = GeneratorStates.of([*inputs, *module_state.values()])

    @property
    def inputs(self) -> list[Tensor]:
        """The microbatch's inputs."""
        return [*self._inputs.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the microbatch keeps for its recomputation: its inputs, and copies of
        buffers.
        """
        return [*self.inputs, *self._buffers.values()]

    def recompute(self) -> Residuals:
        """Run F again and return its residuals; drop its outputs and its updates of buffers.

        Raises:
            SplitError: a tensor that F reads was written or replaced since the first F.
        """
        count = len(self.functions.capture.inputs)
        leaves: list[Any] = self._inputs.take_arguments()[:count]
        state = {**self.module_state, **self._buffers}
        with WithoutAutograd(), self._generators.again():
            return self.functions.run(state, leaves).saved
