"""A microbatch of which only F's inputs are kept, until F runs again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autosplit.device import GeneratorStates
from autosplit.runtime.functions import SplitFunctions
from autosplit.torch_internals.autograd import without_autocast

from .saved_tensors import Residuals, State


class KeptInputs:
    """What it takes to run one microbatch's F once more, with the same results bit for bit.

    To be made before that F runs. Buffers that it writes are kept as they were; everything else
    that it reads must be the same when it runs again.

    Args:
        functions: the graphs that F runs.
        state: the module's parameters and buffers.
        inputs: of the microbatch.
    """

    def __init__(self, functions: SplitFunctions, state: State, inputs: list[Tensor]) -> None:
        self.functions = functions
        self.state = state
        self._buffers = {name: state[name].clone() for name in functions.updated_state}
        steady = [name for name in functions.forward_state if name not in self._buffers]
        names = (*functions.capture.inputs, *steady)
        read = tuple([state[name] for name in steady])
        self._inputs = Residuals(names, list(inputs), read, functions.forward_constants)
        self._generators = GeneratorStates.of([*inputs, *state.values()])

    @property
    def inputs(self) -> list[Tensor]:
        """The microbatch's inputs."""
        return [*self._inputs.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are kept."""
        return [*self.inputs, *self._buffers.values()]

    def run(self) -> Residuals:
        """F again; what it saves. Its outputs, and what it would write into buffers, are dropped.

        Raises:
            SplitError: something that F reads was written in place since, or exchanged.
        """
        count = len(self.functions.capture.inputs)
        leaves: list[Any] = self._inputs.take()[:count]
        state = {**self.state, **self._buffers}
        with torch.no_grad(), without_autocast(), self._generators.again():
            return self.functions.forward(state, leaves).saved
