"""``Stage``: F, I and W of one pipeline stage as methods, without autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, fx, nn

from autosplit.autograd.module_proxy import refuse_split
from autosplit.capture.size_rule import SizeRule
from autosplit.runtime.accumulators import CompletionReport
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.held_microbatches import HeldMicrobatches
from autosplit.runtime.in_flight import MicrobatchState, RecomputableState
from autosplit.runtime.input_overlap import refuse_overlap
from autosplit.runtime.options import SplitArguments, SplitOptions, split_options
from autosplit.runtime.stage_specializations import StageSpecializations
from autosplit.sharded import ShardedModule
from autosplit.torch_internals.autograd import WithoutAutograd, call_accumulate_hooks, is_autocast

from .errors import SplitError


class Stage(HeldMicrobatches):
    """F, I, W and B of one pipeline stage, as calls with a microbatch's number.

    ::

        stage = Stage(module, (example,))             # captured and split here
        (y,) = stage.forward(0, [x])                  # F
        (grad_x,) = stage.backward_input(0, [grad_y]) # I: send grad_x to the previous stage
        stage.backward_weight(0)                      # W: any time later
        stage.publish()                               # sums of weight gradients -> .grad

    Contract:
        - Each microbatch runs ``forward``, and then either ``backward_input`` and
          ``backward_weight`` or ``backward``. Any number of microbatches may be between two calls,
          in any order.
        - A call empties the list of tensors that it is passed. Each tensor is freed at its last use
          inside the stage, if the caller keeps no other reference.
        - Between the calls of a microbatch, no tensor that its graphs read may be written in place.
          A write raises ``SplitError``.
        - Weight gradients are summed inside the stage, in ``gradients``. ``publish`` moves them to
          ``.grad``. Autograd is not involved.
        - One thread at a time may call a stage.

    Terms:
        microbatch: an integer that the caller chooses, and by which calls find its state.
        saved tensors: tensors that F leaves for I or B.
        deferred tensors: tensors that I leaves for W.
        held: tensors of one microbatch between two calls, which may be offloaded.

    Shapes:
        Inputs have the number of dimensions, the dtypes and the devices of the example inputs;
        sizes may differ. With new sizes, the module is captured again. The second capture leaves
        the sizes that vary open, so that no third capture is needed. Some sizes need a capture for
        each value: 0 and 1, sizes that the module branches on, and all sizes with a backend other
        than "eager". Gradients have the shapes of their outputs or inputs.

    If something that the module's forward reads has changed since its capture, the next ``forward``
    captures the module again, which takes seconds. The number of outputs, their dtypes and their
    numbers of dimensions must not change.

    If ``fully_shard`` has sharded the module, the first call that reads parameters gathers them,
    ``publish`` adds to unreduced gradients, and ``sharding.reduce()`` reduces the sums once a step
    and frees the gathered parameters.

    Attributes:
        index: position in the pipeline.
        module: the module; each forward reads its present parameters and buffers.
        sharding: gathers sharded parameters and reduces their gradients.
        waiting_hooks: a list to which ``publish`` adds parameters instead of calling their hooks,
            for a caller that completes their gradients first; None: ``publish`` calls the hooks.
        seed: a function that is called with the microbatch before each F whose graphs may draw
            random numbers, to seed the generators; None: the generators are not seeded.

    Raises:
        CaptureError: the module cannot be captured, or returns something other than tensors.
        SplitError: the graph cannot be split; an option has a wrong value; a memory budget cannot
            be met; or the module is already split or compiled.
        TypeError: an option is unknown; lists the known ones.
        ShardedError: the module is sharded in a way that graphs cannot reproduce.
    """

    waiting_hooks: list[Tensor] | None = None
    seed: Callable[[int], None] | None = None

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        *,
        index: int = 0,
        options: SplitOptions | None = None,
        varying: Sequence[Sequence[Any]] = (),
        **changes: Unpack[SplitArguments],
    ) -> None:
        """Capture ``module(*args)`` and split it. I returns gradients of inputs with
        ``requires_grad``.

        Args:
            module: the module of the stage.
            args: example inputs, or a single one: tensors, or objects that contain tensors (a
                ``BlockMask``, a dataclass), which ``forward`` then takes, too. Each value of a
                number needs its own capture: pass numbers that vary as tensors.
            index: position in the pipeline, for messages.
            options: how the module is split and its graphs run; None: the defaults. Set
                ``defer_whole_backward`` for the first stage of a pipeline.
            varying: further example inputs, whose sizes the first capture leaves open.
            changes: fields of ``SplitOptions`` by name, such as ``backend="inductor"``.

        Raises:
            CaptureError, SplitError, ShardedError: see the class.
        """
        args = (args,) if isinstance(args, Tensor) else args
        owner = f"stage {index}"
        refuse_split(owner, module)
        options = split_options(options, changes, ["index", "varying"])
        super().__init__(owner, module, options.grad_dtype)
        self.index = index
        self.sharding = ShardedModule(module)
        self._sharded = bool(self.sharding.groups)
        self._graphs = StageSpecializations(
            owner, module, args, options, self.sharding if self._sharded else None, varying
        )
        self._outputs = self._graphs.outputs

    def __repr__(self) -> str:
        """The class of the module, and the stage's index."""
        return f"{type(self).__name__}({type(self.module).__name__}, index={self.index})"

    def __reduce__(self) -> Any:
        """Refuse ``copy`` and ``pickle``."""
        raise SplitError(
            f"stage {self.index} cannot be copied or pickled: make a Stage of a copy of its module"
        )

    @property
    def functions(self) -> SplitFunctions:
        """F, I, W and B as used by the latest forward."""
        return self._graphs.current

    @property
    def captured(self) -> tuple[SplitFunctions, ...]:
        """F, I, W and B of each captured graph, the most recently used last."""
        return self._graphs.captured

    @property
    def is_unchanged(self) -> bool:
        """Whether the module is known to be as it was in all captures, so that only the sizes of
        inputs decide between graphs.
        """
        return self._graphs.is_unchanged

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype in which weight gradients are summed; None for the dtype of each gradient."""
        return self._weights.sums.dtype

    def place_gradients(self, memory_for: Callable[[Tensor, torch.dtype], Tensor | None]) -> None:
        """Let weight gradients be summed in memory of the caller.

        Args:
            memory_for: a function from (parameter, dtype) to a tensor of the parameter's shape,
                which need not be initialized; None: the stage allocates the sum. The stage calls it
                before it writes the first gradient, and again with the dtype of ``.grad`` if sums
                have another dtype.
        """
        self._weights.sums.memory_for = memory_for

    def report_completion(self, microbatch: int, report: CompletionReport | None) -> None:
        """Make the last W (or B) of a step report which sums of gradients are complete.

        Args:
            microbatch: the microbatch whose W (or B) is the last of a step.
            report: sets of parameters, and a function. During that W, or at its end, the stage
                calls the function with the index of each set whose sums are all complete. None: no
                report.
        """
        self._weights.last = None if report is None else (microbatch, report)

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Maps the name of a parameter to the sum of its gradients over microbatches, in the order
        in which W (or B) ran. Later microbatches add to these tensors in place.
        """
        return self._weights.sums.tensors

    @property
    def output_specs(self) -> list[tuple[torch.Size, torch.dtype, bool]]:
        """(shape, dtype, whether ``backward_input`` expects a gradient) of each output."""
        return self._graphs.output_specs

    @property
    def joins_weights(self) -> bool:
        """Whether ``backward_weight`` of several microbatches may run products once for all of
        them.

        False for sharded parameters, whose gradients are moved to FSDP's sums after each
        microbatch.
        """
        return not self._sharded and self.functions.most_joined(self.grad_dtype) > 1

    def prepare(self, args: Sequence[Any], varying: Sequence[Sequence[Any]] = ()) -> None:
        """Capture graphs for inputs of these sizes now, instead of at their first forward.

        Afterwards ``functions`` and ``output_specs`` are for these sizes.

        Args:
            args: example inputs, which may differ from the first examples in their sizes only.
            varying: further example inputs, whose sizes a capture leaves open.

        Raises:
            SplitError: the inputs differ in more than sizes, or their outputs would.
            CaptureError: the module cannot be captured for these inputs.
        """
        self._graphs.expect_sizes([args, *varying])
        self._graphs.check_inputs(list(args))
        self._graphs.for_inputs()

    def check_captures(self, check: Callable[[SplitFunctions], None]) -> None:
        """Call ``check`` with each later capture before it runs, for example to refuse outputs."""
        self._graphs.check = check

    def size_rule(self) -> SizeRule:
        """The sizes of the outputs as expressions of the sizes of the inputs. The rule holds for
        the inputs that were prepared or run last, and for all inputs that fit the same graphs.
        """
        return self._graphs.size_rule()

    def accepts(self, args: Sequence[Tensor]) -> bool:
        """Whether ``forward`` accepts inputs like these, whatever their sizes."""
        return self._graphs.accepts(args)

    def forward(
        self,
        microbatch: int,
        inputs: list[Any],
        keep: Literal["saved", "inputs"] = "saved",
        *,
        steady: bool = False,
    ) -> list[Tensor]:
        """F: run the module's forward on these inputs, and return its outputs.

        Args:
            microbatch: the microbatch's number.
            inputs: the module's inputs; emptied.
            keep: tensors to hold until the backward. ``"saved"``: the tensors that F saves.
                ``"inputs"``: only the inputs; ``recompute`` must be called before the backward.
            steady: whether the module is unchanged since the previous forward, as between the
                microbatches of one step. The guards of the graphs are then not checked again.

        Raises:
            SplitError: this microbatch is already between F and its backward; an input has another
                dtype, device or number of dimensions than the examples; an input shares memory with
                a tensor that the module writes into; or the module changed so that it returns other
                outputs.
            CaptureError: the module changed, and can no longer be captured.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return Stage.forward(self, microbatch, inputs, keep, steady=steady)
        saved = self._saved
        waits = microbatch in saved and saved[microbatch].functions.has_backward
        if waits or microbatch in self._inputs:
            raise SplitError(
                f"stage {self.index}: microbatch {microbatch} has run its forward already: run its "
                "backward first, or use another number"
            )
        if not isinstance(inputs, list):
            raise _not_a_list(self.index, inputs)
        graphs = self._graphs
        if not steady:
            graphs.steady.clear()
        sizes = graphs.check_inputs(inputs)
        bound = graphs.steady.get(sizes)
        if bound is None:
            if self._sharded:
                self.sharding.unshard()
            bound = graphs.bind(sizes, graphs.for_inputs())
        functions, module_state, record = bound
        graphs.current = functions
        if functions.updated_inputs:
            refuse_overlap(functions, inputs, module_state)
        if self.seed is not None and functions.draws:
            self.seed(microbatch)
        recomputable = None
        if keep == "inputs" and functions.has_backward:
            recomputable = RecomputableState(functions, module_state, inputs)
        leaves = [*inputs]
        inputs.clear()
        result = functions.run(module_state, leaves, record)
        if recomputable is not None:
            self._inputs[microbatch] = recomputable
        else:
            saved[microbatch] = MicrobatchState(functions, result.saved, module_state)
        count, values = len(self._outputs), functions.capture.values
        if values:
            for value, tensor in zip(values, result.outputs[count:], strict=False):
                value.set(self.module, tensor)
        return result.outputs[:count]

    def recompute(self, microbatch: int) -> None:
        """Run F again for a microbatch that kept only its inputs, to save tensors for its backward.

        The second run of F draws the same random numbers as the first. Its outputs are dropped, and
        it writes no buffer.

        Raises:
            SplitError: the microbatch did not run ``forward(..., keep='inputs')``; or an input, a
                parameter or a buffer was written in place since then.
        """
        if not self.functions.has_backward:
            return
        if microbatch not in self._inputs:
            raise SplitError(
                f"stage {self.index}: microbatch {microbatch} does not wait to be recomputed; run "
                "forward(..., keep='inputs') before recompute()"
            )
        state = self._inputs.pop(microbatch)
        if self._sharded:
            self.sharding.unshard()
        residuals = state.recompute()
        self._saved[microbatch] = MicrobatchState(state.functions, residuals, state.module_state)

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """I: compute the gradients of the inputs, and hold the deferred tensors for W.

        Args:
            microbatch: the microbatch's number.
            output_grads: one gradient for each output, or None for an output without a gradient;
                emptied. Inputs and parameters that contribute only to outputs without a gradient
                get no gradient.

        Returns:
            One gradient for each input; None for inputs without a gradient.

        Raises:
            SplitError: this microbatch is not between F and its backward; a gradient does not fit
                its output; or a saved tensor was written in place since F.
        """
        if torch.is_grad_enabled() or is_autocast():
            with WithoutAutograd():
                return Stage.backward_input(self, microbatch, output_grads)
        state, tangents = self._begin_backward(microbatch, output_grads)
        if tangents is None:
            self._weights.in_flight[microbatch] = state
            return [None] * len(state.functions.capture.inputs)
        grads = self._weights.backward_input(microbatch, state, tangents)
        if self._sharded:
            self._accumulate_sharded()
        return grads

    def inputs_given(self, come: Sequence[bool]) -> list[bool]:
        """For each input, whether I returns a gradient for it.

        Args:
            come: for each output, whether ``backward_input`` is passed a gradient for it.
        """
        updated = len(self.functions.output_names) - len(come)
        present = [has_gradient or None for has_gradient in come] + [None] * updated
        return self.functions.dependence.inputs_given(present)

    def backward_weight(self, microbatch: int, *later: int) -> None:
        """W: compute weight gradients of microbatches, and add them to ``gradients``.

        Args:
            microbatch: the microbatch's number.
            later: more microbatches, whose W runs directly afterwards. If ``accumulation`` joins
                products, all microbatches' products run together.

        Raises:
            SplitError: a microbatch is not between I and W; a deferred tensor was written in place
                since I; or a parameter was replaced since an earlier microbatch.
        """
        if torch.is_grad_enabled() or is_autocast():
            with WithoutAutograd():
                Stage.backward_weight(self, microbatch, *later)
            return
        if self._sharded and self.functions.has_backward:
            self.sharding.unshard()
        self._weights.backward_weight(microbatch, *later)
        if self._sharded:
            self._accumulate_sharded()
        if self._weights.last is not None:
            self._weights.report_end((microbatch, *later)[-1])

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        """B: I and W as one graph. Arguments and result are those of ``backward_input``.

        Raises:
            SplitError: as for ``backward_input`` and ``backward_weight``.
        """
        if torch.is_grad_enabled() or is_autocast():
            with WithoutAutograd():
                return Stage.backward(self, microbatch, output_grads)
        state, tangents = self._begin_backward(microbatch, output_grads)
        if tangents is None:
            grads: list[Tensor | None] = [None] * len(state.functions.capture.inputs)
        else:
            grads = self._weights.backward(microbatch, state, tangents)
        if self._sharded:
            self._accumulate_sharded()
        if self._weights.last is not None:
            self._weights.report_end(microbatch)
        return grads

    def source(self, call: str, *, adds: bool = False, count: int = 1) -> fx.GraphModule:
        """The FX graph of a call, as the backend gets it.

        Args:
            call: ``"forward"``, ``"backward_input"``, ``"backward_weight"`` or ``"backward"``.
            adds: whether to return the form that adds to existing sums of gradients, instead of the
                form that returns new gradients.
            count: the number of microbatches of a joined W.
        """
        return self.functions.source(call, self.grad_dtype, adds=adds, count=count)

    def compile(self, calls: Iterable[str] = ("backward_input", "backward_weight") * 2) -> None:
        """Compile the graphs of these calls now, instead of at their first run.

        Args:
            calls: ``"backward_input"``, ``"backward_weight"`` and ``"backward"`` in the order of a
                step. The first W (or B) of a step creates gradients, and each later one adds to
                them. To add, a backend may compile a second form of the graph. The default is a
                step of two microbatches with a split backward.

        Raises:
            SplitError: an unknown call; lists the known ones.
            BackendError: the backend cannot compile a graph.
        """
        sums, last = self._weights.sums, self._weights.last
        parts = () if last is None else last[1].parts
        has_memory = sums.memory_for is not None
        self.functions.backward_graphs.compile_calls(
            calls, sums.dtype, overwrites=has_memory, parts=parts
        )

    def publish(self) -> None:
        """Add ``gradients`` to the parameters' ``.grad``, drop the sums, and call the hooks of
        ``register_post_accumulate_grad_hook``.

        Raises:
            SplitError: a microbatch has not run its W.
        """
        if waiting := ", ".join(map(str, sorted(self._weights.in_flight))):
            raise SplitError(
                f"stage {self.index}: weight gradients of microbatch {waiting} are pending; "
                "call backward_weight() for each first"
            )
        hooked = self._weights.sums.add_to_parameters()
        if self.waiting_hooks is None:
            call_accumulate_hooks(hooked)
        else:
            self.waiting_hooks += hooked

    def reset(self) -> None:
        """Drop all microbatches in flight, and the sums of gradients."""
        self._graphs.steady.clear()
        self._inputs.clear()
        self._saved.clear()
        self._weights.clear()

    def _begin_backward(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> tuple[MicrobatchState, list[Tensor | None] | None]:
        """Remove the state of a microbatch for its backward.

        Returns:
            (the state; a new list with the gradient of each output, then None for each input into
            which the module writes). None instead of the list if no input and no parameter needs a
            gradient.
        """
        if microbatch in self._inputs:
            raise SplitError(
                f"stage {self.index}: microbatch {microbatch} kept its inputs only; call "
                f"recompute({microbatch}) before its backward"
            )
        state, names = self._saved.remove_state(microbatch), self._outputs
        if not state.functions.has_backward:
            output_grads.clear()
            return state, None
        if self._sharded:
            self.sharding.unshard()
        if not isinstance(output_grads, list):
            raise _not_a_list(self.index, output_grads)
        if len(output_grads) != len(names):
            raise SplitError(
                f"stage {self.index} has {len(names)} outputs, got {len(output_grads)} gradients: "
                "pass one for each output, None if it gets none"
            )
        updated = len(state.functions.output_names) - len(names)
        tangents = [*output_grads, *[None] * updated]
        output_grads.clear()
        return state, tangents

    def _accumulate_sharded(self) -> None:
        """Add the stage's gradient sums of sharded parameters to FSDP's sums. Needed only if FSDP's
        sums have another dtype than the parameters.
        """
        if any(group.converts_gradients for group in self.sharding.groups):
            self._weights.sums.add_to_parameters()
            self.sharding.accumulate()


def _not_a_list(index: int, tensors: object) -> SplitError:
    """The error for an argument that is not a list, because the call must empty it."""
    return SplitError(
        f"stage {index}: expected a list of tensors, which the call empties, such as [x]; got "
        f"a {type(tensors).__name__}"
    )
