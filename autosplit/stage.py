"""``Stage``: F, I and W of one pipeline stage as calls on explicit state, without autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from autosplit.autograd.module_proxy import refuse_proxies
from autosplit.passes import CollectiveCosts
from autosplit.runtime.build import SplitOptions
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.in_flight import (
    HeldStorages,
    InFlightMicrobatches,
    KeptInputs,
    MicrobatchState,
    StageBackward,
    lent_storages,
)
from autosplit.runtime.residuals import State
from autosplit.runtime.stage_specializations import StageSpecializations
from autosplit.sharded import ShardedModule
from autosplit.torch_internals.autograd import (
    call_accumulate_hooks,
    without_autocast,
    without_grad,
)
from autosplit.torch_internals.state import distinct_storage_bytes

from .errors import SplitError


class Stage:
    """One pipeline stage: a module split for microbatches of any size.

    Microbatches are keys; any number may be between F and I, and between I and W. Lists of
    tensors are handed over: a call empties the list it is given, so that tensors die at
    their last use inside the stage.

    Inputs of other sizes than those before are traced for again, the second time with the sizes
    that vary left open, so that no more is needed; sizes that the module branches on, 0 and 1
    take graphs of their own, and with another backend than "eager" each combination does.
    Where the module has changed since it was traced, in anything that its forward reads, the
    next forward traces it again, which takes seconds; its outputs must stay as they were.

    Of a module that ``fully_shard`` has sharded, parameters are gathered by the first call that
    reads them; ``publish`` adds to gradients that are not reduced; ``sharding.reduce()`` reduces
    these, once a step, and frees the gathered parameters.

    Attributes:
        index: position in the pipeline.
        module: the module whose parameters and buffers are read, as they are at each forward.
        sharding: gathers its parameters and reduces their gradients, where they are sharded.
        waiting_hooks: if a list, ``publish`` adds parameters to it instead of calling their hooks,
            as their gradients are not whole yet.
        seed: seeds the random generators before F of a microbatch, if graphs may draw random
            numbers; None leaves the generators as they are.
    """

    waiting_hooks: list[Tensor] | None = None
    seed: Callable[[int], None] | None = None

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        *,
        index: int = 0,
        backend: str = "eager",
        memory: str | int = "balanced",
        grad_dtype: torch.dtype | None = None,
        defer_whole_backward: bool = False,
        overlap: CollectiveCosts | None = None,
    ) -> None:
        """Trace ``module(*args)``; inputs with ``requires_grad`` get a gradient from I.

        Args:
            module: the stage.
            args: example inputs, or the only one: tensors, or objects that hold some (a
                ``BlockMask``, a dataclass), which ``forward`` then takes, too; what else
                is in them stays as it is here.
            index: position in the pipeline.
            backend: how graphs are run, see ``autosplit.split``.
            memory: what is held between the calls, see ``autosplit.split``.
            grad_dtype: in which dtype weight gradients are summed; None for each parameter's
                own. With ``torch.float32`` nothing of a bfloat16 gradient is lost in the sum;
                ``publish`` rounds it once, to the parameter's ``grad_dtype``.
            defer_whole_backward: for a stage whose I nobody waits for, the first of a pipeline:
                where no input needs a gradient, I only passes on what it takes and W is the whole
                backward. Without it I is the chain of derivatives down to the earliest parameters.
            overlap: what collectives take, see ``autosplit.split``.

        Raises:
            CaptureError: the module cannot be traced, or returns something besides tensors.
            SplitError: the graph cannot be split, the backend or the memory setting is unknown, a
                memory budget cannot be met, ``grad_dtype`` is none, or the module is split or
                compiled already.
            ShardedError: ``fully_shard`` has sharded the module in a way that cannot be taken
                apart.
        """
        args = (args,) if isinstance(args, Tensor) else args
        self.index = index
        self.module = module
        owner = f"stage {index}"
        _refuse_split(owner, module)
        options = SplitOptions(backend, memory, defer_whole_backward, overlap)
        self.sharding = ShardedModule(module)
        self._sharded = bool(self.sharding.groups)
        self._graphs = StageSpecializations(
            owner, module, args, options, self.sharding if self._sharded else None
        )
        self._outputs = self._graphs.outputs
        self._found: tuple[object, SplitFunctions, State] | None = None
        self._inputs: dict[int, KeptInputs] = {}
        self._saved = InFlightMicrobatches(owner, "forward")
        self._weights = StageBackward(owner, grad_dtype)
        self._held = HeldStorages(owner, self._saved, self._weights.in_flight)

    def __repr__(self) -> str:
        """Its module, and how that was split."""
        return f"{type(self).__name__}({type(self.module).__name__}, index={self.index})"

    def __reduce__(self) -> Any:
        """What ``copy`` and ``pickle`` ask for."""
        raise SplitError(
            f"stage {self.index} is not copied or pickled: make a Stage of a copy of its module"
        )

    @property
    def functions(self) -> SplitFunctions:
        """The graphs and their callables, those of the latest forward."""
        return self._graphs.current

    @property
    def captured(self) -> tuple[SplitFunctions, ...]:
        """All graphs that are kept, the latest used last."""
        return self._graphs.captured

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Parameter name -> gradient added up over microbatches, in the order in which W (or B)
        ran. W of a later microbatch adds into these tensors in place.
        """
        return self._weights.sums.tensors

    @property
    def output_specs(self) -> list[tuple[torch.Size, torch.dtype, bool]]:
        """Shape, dtype and whether a gradient comes back, of every output."""
        return self._graphs.output_specs

    @property
    def saved_tensors(self) -> list[Tensor]:
        """Tensors held between F and I; several may lie in one storage."""
        kept = [tensor for each in self._inputs.values() for tensor in each.tensors]
        return [*self._saved.tensors, *kept]

    @property
    def deferred_tensors(self) -> list[Tensor]:
        """Tensors held between I and W, likewise."""
        return self._weights.in_flight.tensors

    @property
    def saved_bytes(self) -> int:
        """Bytes of distinct storage held between F and I."""
        return distinct_storage_bytes(self.saved_tensors)

    @property
    def deferred_bytes(self) -> int:
        """Bytes of distinct storage held between I and W."""
        return self._weights.in_flight.bytes

    def prepare(self, args: Sequence[Tensor]) -> None:
        """Have graphs for inputs of these sizes now, rather than at their first forward; what this
        stage says of its outputs and graphs is of these then.

        Args:
            args: example inputs, unlike those it was made with in their sizes at most.

        Raises:
            SplitError: they are unlike in something else, or the outputs would be.
            CaptureError: the module cannot be traced for them.
        """
        self._graphs.check_inputs(list(args))
        self._graphs.for_inputs()

    def takes(self, args: Sequence[Tensor]) -> bool:
        """Whether these are inputs for this stage, whatever their sizes."""
        return self._graphs.takes(args)

    def forward(
        self,
        microbatch: int,
        inputs: list[Any],
        keep: Literal["saved", "inputs"] = "saved",
        *,
        steady: bool = False,
    ) -> list[Tensor]:
        """F: outputs for these inputs; empties ``inputs``.

        Args:
            microbatch: whose.
            inputs: of the module.
            keep: what is held for the backward: what the graph saves, or only the inputs, from
                which ``recompute`` makes it before the backward.
            steady: whether nothing that the module's forward reads was changed since the forward
                before, as between the microbatches of one step: what that one ran is not asked
                again whether it fits.

        Raises:
            SplitError: this microbatch is already between F and its backward; an input has another
                dtype, device or number of dimensions than the stage was made with; or the module
                changed so that its outputs did.
            CaptureError: the module changed and cannot be traced any more.
        """
        waits = microbatch in self._saved and self._saved.get(microbatch).functions.has_backward
        if waits or microbatch in self._inputs:
            raise SplitError(f"stage {self.index}: microbatch {microbatch} has run its forward")
        _check_list(self.index, inputs)
        sizes, found = self._graphs.check_inputs(inputs), self._found
        if not steady or found is None or found[0] is not sizes:
            if self._sharded:
                self.sharding.unshard()
            found = sizes, self._graphs.for_inputs(), self._graphs.state()
            # Which graphs fit may be decided by what F leaves.
            steady = not (self._sharded or found[1].updated_state)
            self._found = found if steady else None
        _, functions, state = found
        if self.seed is not None and functions.draws:
            self.seed(microbatch)
        kept = None
        if keep == "inputs" and functions.has_backward:
            kept = KeptInputs(functions, state, inputs)
        lent = lent_storages(inputs)
        with without_grad():
            taken = [*inputs]
            inputs.clear()
            result = functions.run(state, taken)
        if kept is not None:
            self._inputs[microbatch] = kept
        else:
            arrived = MicrobatchState(functions, result.saved, state, lent)
            self._saved.put(microbatch, arrived)
        return result.outputs[: len(self._outputs)]

    def recompute(self, microbatch: int) -> None:
        """F again, of a microbatch that kept its inputs only; nothing but what it saves comes of
        it. It draws the random numbers that F drew, and no buffer is written.

        Raises:
            SplitError: this microbatch kept something else; or an input, a parameter or a buffer
                was written in place since.
        """
        if not self.functions.has_backward:
            return
        if microbatch not in self._inputs:
            raise SplitError(
                f"stage {self.index}: microbatch {microbatch} does not wait to be recomputed; run "
                "forward(..., keep='inputs') before recompute()"
            )
        kept = self._inputs.pop(microbatch)
        if self._sharded:
            self.sharding.unshard()
        lent = lent_storages(kept.inputs)
        saved = kept.run()
        self._saved.put(microbatch, MicrobatchState(kept.functions, saved, kept.state, lent))

    def held(self, microbatch: int, kept: Iterable[Tensor] = ()) -> list[Tensor]:
        """What could be away for a while of a microbatch between F and its backward, or I and W.

        One tensor for each storage that this microbatch holds and neither another nor the module:
        its bytes.

        Args:
            microbatch: whose.
            kept: tensors whose storages others hold besides.

        Raises:
            SplitError: this microbatch is at neither place.
        """
        return self._held.of(microbatch, kept)

    def detach_held(self, microbatch: int, kept: Iterable[Tensor] = ()) -> list[Tensor]:
        """Give away what ``held`` returns. Until it is back, nothing can be run on the microbatch.

        Args:
            microbatch: whose.
            kept: as for ``held``.

        Raises:
            SplitError: as ``held``; or it is away already, or was written in place.
        """
        return self._held.detach(microbatch, kept)

    def attach_held(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Put back what ``detach_held`` gave: tensors of the same bytes, in the same order.

        Raises:
            SplitError: other tensors than it gave, or it gave none.
        """
        self._held.attach(microbatch, tensors)

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """I: gradients of the inputs, None where none is needed; empties ``output_grads``.

        Where an output has None, what contributes to such outputs only gets no gradient.

        Raises:
            SplitError: this microbatch has no forward to go back through.
        """
        taken = self._take(microbatch)
        if not taken.functions.has_backward:
            self._weights.in_flight.put(microbatch, taken)
            return self._nothing(output_grads)
        taken = taken._replace(lent=taken.lent | lent_storages(output_grads))
        with without_grad(), without_autocast():
            given = self._output_grads(taken.functions, output_grads)
            grads = self._weights.input(microbatch, taken, given)
        if self._sharded:
            self._accumulate_sharded()
        return grads

    def inputs_given(self, come: Sequence[bool]) -> list[bool]:
        """For each input whether I gives a gradient of it where these outputs get one."""
        others = len(self.functions.output_names) - len(come)
        arrived = [each or None for each in come] + [None] * others
        return self.functions.dependence.inputs_given(arrived)

    def backward_weight(self, microbatch: int) -> None:
        """W: add this microbatch's weight gradients to ``gradients``.

        Raises:
            SplitError: this microbatch has nothing deferred, or ran on other parameters than
                those before it.
        """
        if self._sharded and self.functions.has_backward:
            self.sharding.unshard()
        with without_grad(), without_autocast():
            self._weights.run(microbatch)
        if self._sharded:
            self._accumulate_sharded()

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        """B: I and W in one unsplit call; empties ``output_grads``.

        Raises:
            SplitError: this microbatch has no forward to go back through.
        """
        taken = self._take(microbatch)
        if not taken.functions.has_backward:
            return self._nothing(output_grads)
        with without_grad(), without_autocast():
            grads = self._weights.whole(taken, self._output_grads(taken.functions, output_grads))
        if self._sharded:
            self._accumulate_sharded()
        return grads

    def source(self, call: str, *, adds: bool = False) -> fx.GraphModule:
        """The graph behind a call, as it is given to the backend.

        Args:
            call: the name of one of this class's methods; W counts as run whole.
            adds: whether it adds to gradients that are there, rather than make them.
        """
        return self.functions.source(call, self._weights.sums.dtype, adds=adds)

    def compile(self, calls: Iterable[str] = ("backward_input", "backward_weight") * 2) -> None:
        """Compile the graphs of these calls ahead of their first run, and no others.

        Args:
            calls: names of this class's methods, in the order of one step, which begins without
                gradients: later calls add to those that earlier ones made, which a backend may
                have to compile another form of a graph for. Two microbatches, split, if not said.

        Raises:
            SplitError: an unknown call; lists the known ones.
            BackendError: the backend cannot compile a graph.
        """
        self.functions.compile(calls, self._weights.sums.dtype)

    def publish(self) -> None:
        """Move ``gradients`` into the parameters' ``.grad``, adding to what is there. Hooks of
        ``register_post_accumulate_grad_hook`` are called.

        Raises:
            SplitError: a microbatch's gradients are still pending.
        """
        hooked = self._weights.publish()
        if self.waiting_hooks is None:
            call_accumulate_hooks(hooked)
        else:
            self.waiting_hooks += hooked

    def reset(self) -> None:
        """Forget every microbatch in flight and the gradients gathered so far."""
        self._found = None
        self._inputs.clear()
        self._saved.clear()
        self._weights.clear()

    def _nothing(self, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of inputs where all is frozen."""
        output_grads.clear()
        return [None] * len(self.functions.capture.inputs)

    def _take(self, microbatch: int) -> MicrobatchState:
        """The state of a microbatch for its backward, which is let go of here."""
        if microbatch in self._inputs:
            raise SplitError(
                f"stage {self.index}: microbatch {microbatch} kept its inputs only; call "
                f"recompute({microbatch}) before its backward"
            )
        taken = self._saved.take(microbatch)
        if self._sharded and taken.functions.has_backward:
            self.sharding.unshard()
        return taken

    def _accumulate_sharded(self) -> None:
        """Let sharded parameters' gradients that are reduced in another dtype be added up in it."""
        if any(group.adds_in_another_dtype for group in self.sharding.groups):
            self._weights.sums.publish()
            self.sharding.accumulate()

    def _output_grads(
        self, functions: SplitFunctions, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """A gradient for each output of F, in a list of its own."""
        names = self._outputs
        _check_list(self.index, output_grads)
        if len(output_grads) != len(names):
            raise SplitError(
                f"stage {self.index} has {len(names)} outputs, got {len(output_grads)} gradients"
            )
        others = len(functions.output_names) - len(names)
        taken = [*output_grads, *[None] * others]
        output_grads.clear()
        return taken


def _check_list(index: int, given: object) -> None:
    if not isinstance(given, list):
        raise SplitError(
            f"stage {index}: a call takes a list of tensors, which it empties, such as [x]; got a "
            f"{type(given).__name__}"
        )


def _refuse_split(owner: str, module: nn.Module) -> None:
    """Refuse a module whose forward is split or compiled already."""
    if hasattr(module, "_orig_mod"):
        raise SplitError(
            f"{owner}: the module is compiled by torch.compile, which hides its graph. Give the "
            "module itself, ._orig_mod of this one, and backend='inductor' to have it compiled"
        )
    refuse_proxies(owner, module)
