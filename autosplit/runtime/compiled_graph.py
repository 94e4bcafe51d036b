"""``CompiledGraph``: one compiled graph, with roles for arguments and results. ``GradientGraph``:
I, W or B in several compiled forms, which return weight gradients or add them into accumulators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from autosplit.backends.backend import (
    Backend,
    Boxed,
    collecting_new_objects_only,
)
from autosplit.errors import BackendError, SplitError
from autosplit.passes import Kind, PassError, Role, SplitGraphs
from autosplit.passes.graph import STATE, inputs, outputs
from autosplit.passes.lowering.accumulate import REPORT, completion_order
from autosplit.passes.lowering.forms import Changed, Fuses, GraphForm, Strides
from autosplit.passes.lowering.fuse import fusible_count
from autosplit.passes.lowering.join import joinable_count, joined_role
from autosplit.passes.manager import When, run_graph_passes
from autosplit.passes.subgraph import subgraphs
from autosplit.torch_internals.gradients import add_together, zero_together

from .accumulation import MOST_JOINED, Accumulation
from .accumulators import Accumulators, Parts
from .anomaly import copied, refuse_nan


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """A graph that a backend has compiled.

    Attributes:
        call: takes a list of arguments, empties it, and returns a list of results. The caller keeps
            no reference to the arguments, so each tensor is freed at its last use inside.
        inputs: roles of the arguments, in order.
        outputs: roles of the results, in order.
        strides: maps the role of a result that only the next graph reads to the strides that the
            backend chose.
    """

    call: Boxed
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    strides: Mapping[Role, Strides]

    def with_order(self, arguments: Sequence[Role], wanted: Sequence[Role]) -> Boxed:
        """Return the compiled function with its arguments and results in another order.

        Args:
            arguments: roles of the list that the returned function takes; the graph may read only
                some.
            wanted: roles of the list that the returned function returns. For a role that the graph
                does not return, the list has None.
        """
        order, call = positions(self.inputs, arguments), self.call
        at = {role: index for index, role in enumerate(self.outputs)}
        picked = [at.get(role, -1) for role in wanted]  # -1 is a None that run appends
        takes_all = order == [*range(len(arguments))]
        if takes_all and picked == [*range(len(self.outputs))]:
            return call
        take, pick = _getter(order), _getter(picked)

        def run(pool: list[Any]) -> list[Any]:
            args = pool
            if not takes_all:
                args = [*take(pool)]
                pool.clear()
            results = call(args)
            results.append(None)
            return [*pick(results)]

        return run


def _getter(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that returns the items at these positions of a list."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[at] for at in places]


def positions(wanted: Iterable[Role], roles: Sequence[Role]) -> list[int]:
    """The index in ``roles`` of each wanted role."""
    at = {role: index for index, role in enumerate(roles)}
    return [at[role] for role in wanted]


def compile_graph(name: str, module: fx.GraphModule, backend: Backend) -> CompiledGraph:
    """Compile one graph.

    Raises:
        BackendError: the backend cannot compile the graph; names it.
    """
    with _errors_name(name, backend):
        call, strides = backend.compile(name, module)
    if backend.gathering is not None:
        call = backend.gathering.graph(name, module, call)
    arguments = tuple(inputs(module.graph))
    results = tuple(role for role, _ in outputs(module.graph))
    return CompiledGraph(call, arguments, results, strides)


def prepare_joint(joint: fx.GraphModule, backend: Backend) -> None:
    """Let a backend rewrite a joint graph in place, before it is split.

    Raises:
        BackendError: the backend fails.
    """
    with _errors_name("joint", backend):
        backend.rewrite(joint)


@contextlib.contextmanager
def _errors_name(graph: str, backend: Backend) -> Iterator[None]:
    """Context that raises errors of the backend as ``BackendError`` with the graph's name."""
    try:
        yield
    except (BackendError, PassError):
        raise  # a PassError says that the graph cannot be split, whatever runs it
    except Exception as error:
        kind = type(backend).__name__.lower()
        raise BackendError(
            f"backend {kind!r} cannot compile the {graph} graph ({type(error).__name__}: {error}); "
            "backend='eager' runs every graph that can be split"
        ) from error


_SMALL = 2**20  # bytes of all weight gradients of a microbatch

AddingForm: TypeAlias = "Literal['returns', 'adds', 'overwrites']"
"""How a graph leaves gradients: as new tensors, added to accumulators, or written into them."""


class GradientGraph:
    """I, W or B: in the form that returns gradients, and in forms that add into accumulators.

    Args:
        program: the split graphs of the module.
        name: the graph's name in ``program``.
        arguments: roles of the arguments, in the order in which callers pass them.
        parameters: names of the parameters whose gradients are results, in order.
        results: roles of the other results, in order.
        suffix: appended to the graph's name for the backend.
        backend: compiles the graph.
        accumulation: how matrix products add gradients.

    Attributes:
        follower: the graph that runs after this one. It is compiled before the first run of this
            one, so that the C++ compiler works on both. None: nothing else is compiled then.
    """

    follower: GradientGraph | None = None

    def __init__(
        self,
        program: SplitGraphs,
        name: str,
        arguments: Sequence[Role],
        parameters: Sequence[str],
        results: Sequence[Role] = (),
        *,
        suffix: str,
        backend: Backend,
        accumulation: Accumulation,
    ) -> None:
        self._program = program
        self._graph = name
        self._module = program.graphs()[name]
        self._name = name + suffix
        self._arguments = arguments
        self.parameters = parameters
        self._results = results
        self._backend = backend
        self._accumulation = accumulation
        self._variants: dict[tuple[torch.dtype | None, AddingForm, int, Parts], Boxed] = {}

    def most_joined(self, dtype: torch.dtype | None) -> int:
        """Return the largest number of microbatches that one call of the graph can compute.

        It is 1 if no product of the graph is joined. If ``dtype`` is not the gradients' dtype, no
        product is joined, because the gradient of each microbatch is converted and added by itself.
        """
        is_wider = dtype is not None and any(v.dtype is not dtype for v in self._gradients)
        return MOST_JOINED if self._gains_by_joining and not is_wider else 1

    @cached_property
    def _gains_by_joining(self) -> bool:
        rows = self._accumulation.joined_rows
        return rows > 0 and self._saves_calls(joinable_count(self._module, rows), 1 / 4)

    def _saves_calls(self, count: int, least: float) -> bool:
        """Whether ``count`` operators that add gradients in the graph save time.

        Small gradients that a graph returns are added by one call for all of them. If the graph
        adds them, each is added by a call of its own. So ``count`` must be at least the share
        ``least`` of the gradients; benchmarks/accumulation measures where this saves time.
        """
        return count > 0 and (not self._are_small or count >= least * len(self.parameters))

    @cached_property
    def _are_small(self) -> bool:
        """Whether all gradients are dense, and small enough to be held beside their sums."""
        return self._is_dense and sum(value.nbytes for value in self._gradients) <= _SMALL

    def run(
        self,
        pool: list[Any],
        gradients: Accumulators | None,
        dtype: torch.dtype | None,
        count: int = 1,
    ) -> tuple[list[Any], Sequence[Tensor]]:
        """Run the graph.

        Args:
            pool: the arguments, in the order of ``arguments``; emptied. With several microbatches,
                the list has the deferred values of each microbatch in turn, and at the end
                parameters and buffers once.
            gradients: accumulators; None: return new gradients.
            dtype: dtype of the accumulators; None for the dtype of each gradient.
            count: the number of microbatches, at most ``most_joined``.

        Returns:
            (the other results, the accumulators or new gradients).

        Raises:
            AnomalyError: under anomaly detection, a gradient has a NaN.
        """
        checks_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        arguments = self._copy_arguments(pool) if checks_nan else None
        form: AddingForm = "returns"
        parts: Parts = ()
        if gradients is not None:
            form = self._form_of_first(gradients) if gradients.overwrites else self._adding_form
            if form != "returns":
                pool += gradients.tensors
                if gradients.report is not None and self._reports_inside:
                    parts = gradients.report.parts
                    pool.append(gradients.report.function)
        key = dtype, form, count, parts
        call = self._variants.get(key) or self._first_call(*key)
        results = call(pool)
        computed: Sequence[Tensor] = results[len(self._results) :]
        del results[len(self._results) :]
        if gradients is not None:
            if form == "returns" and computed:
                add_together(gradients.tensors, computed)
            computed = gradients.tensors
        if checks_nan:
            self._refuse_nan(results, computed, arguments)
        return results, computed

    def _first_call(
        self, dtype: torch.dtype | None, form: AddingForm, count: int, parts: Parts
    ) -> Boxed:
        """Compile a form that is about to run, and the graph that runs next."""
        call = self._variant(dtype, form, count, parts)
        if self.follower is not None:
            self.follower.compile_form(dtype, adds=form == "adds")
        return call

    def _copy_arguments(self, pool: Sequence[Any]) -> dict[Role, Any] | None:
        """Copies of the arguments, to run the graph once more in search of a NaN."""
        # Sharded parameters may have no memory yet, so their graphs cannot be run once more.
        if self._backend.gathering is not None:
            return None
        return dict(zip(self._arguments, copied(pool), strict=True))

    def _refuse_nan(
        self, results: list[Any], computed: Sequence[Tensor], arguments: dict[Role, Any] | None
    ) -> None:
        """Raise ``AnomalyError`` if a gradient has a NaN."""
        roles = [*self._results, *(Role(Kind.PARAMETER_GRAD, name) for name in self.parameters)]
        returned = zip(roles, [*results, *computed], strict=True)
        refuse_nan(self._name, returned, self._module, arguments)

    def _form_of_first(self, gradients: Accumulators) -> AddingForm:
        if self._first_form != "overwrites":
            zero_together(gradients.tensors)
        return self._first_form

    def compile_form(
        self,
        dtype: torch.dtype | None,
        *,
        adds: bool,
        overwrites: bool = False,
        count: int = 1,
        parts: Parts = (),
    ) -> None:
        """Compile one form of the graph, unless it is compiled already.

        Args:
            dtype: dtype of the accumulators; None for the dtype of each gradient.
            adds: whether the form adds into accumulators.
            overwrites: whether the form writes the first gradients into accumulators that are not
                initialized.
            count: the number of microbatches that the form runs.
            parts: sets of parameters that are reported when their gradients are complete.
        """
        first: AddingForm = self._first_form if overwrites else "returns"
        form = self._adding_form if adds else first
        is_reported = form != "returns" and self._reports_inside
        self._variant(dtype, form, count, parts if is_reported else ())

    def completion_order(self) -> list[str]:
        """Names of the parameters in the order in which their gradients are complete."""
        order = completion_order(self.source(None, adds=True))
        return order or [*self.parameters]  # without accumulators, all at the graph's end

    @cached_property
    def _first_form(self) -> AddingForm:
        """The form for accumulators that are not initialized.

        The form overwrites the accumulators, with two exceptions that add to zeros instead: a
        compiling backend, for which another form takes seconds, and sparse gradients, which cannot
        be copied into dense memory.
        """
        is_quick = self._adding_form == "adds" and self._is_dense and not self._backend.compiles
        return "overwrites" if is_quick else self._adding_form

    @cached_property
    def _adding_form(self) -> AddingForm:
        return "returns" if self._adds_outside else "adds"

    @cached_property
    def _adds_outside(self) -> bool:
        """Whether gradients are added to accumulators after the graph has run, all at once, so that
        the graph needs no form that adds.

        An interpreting backend adds them outside if all gradients are small, so that holding them
        is cheap, and few operators add them themselves. For a compiling backend, a second form
        takes seconds. It adds gradients outside if all are of norms and biases, or if some are
        sparse, which its graphs cannot add.
        """
        if self._backend.compiles:
            return not self._is_dense or all(value.ndim <= 1 for value in self._gradients)
        fuses = self._accumulation.fuses and self._saves_calls(fusible_count(self._module), 1 / 2)
        return self._are_small and not fuses

    @cached_property
    def _gradients(self) -> list[Tensor]:
        """Fake tensors with the shapes and dtypes of the gradients."""
        wanted = {Role(Kind.PARAMETER_GRAD, name) for name in self.parameters}
        return [v.meta["val"] for role, v in outputs(self._module.graph) if role in wanted]

    @cached_property
    def _is_dense(self) -> bool:
        return all(value.layout is torch.strided for value in self._gradients)

    @cached_property
    def _reports_inside(self) -> bool:
        """Whether generated code can call the report's function; a compiling backend accepts
        operators only.
        """
        return not self._backend.compiles or bool(subgraphs(self._module.graph))

    def _variant(
        self, dtype: torch.dtype | None, form: AddingForm, count: int, parts: Parts
    ) -> Boxed:
        key = dtype, form, count, parts
        if key not in self._variants:
            with collecting_new_objects_only():
                self._variants[key] = self._compile_form(*key)
        return self._variants[key]

    def source(self, dtype: torch.dtype | None, *, adds: bool, count: int = 1) -> fx.GraphModule:
        """The FX graph of one form, before it is compiled; arguments are those of ``compile_form``.

        Raises:
            SplitError: a pass broke an invariant.
        """
        return self._source(dtype, self._adding_form if adds else "returns", count)

    def _source(
        self, dtype: torch.dtype | None, form: AddingForm, count: int, parts: Parts = ()
    ) -> fx.GraphModule:
        program = self._program
        if count > 1:
            joins = GraphForm(self._graph, count=count, rows=self._accumulation.joined_rows)
            program = self._with_passes(When.JOINING, joins, program)
        program = self._with_passes(When.WRITING, GraphForm(self._graph), program)
        if form == "returns":
            return program.graphs()[self._graph]
        adds = GraphForm(
            self._graph,
            dtype=dtype,
            writes_first=form == "overwrites",
            fuses=self._fuses,
            reports=parts,
        )
        (module,) = self._run_passes(When.ACCUMULATING, adds, program).values()
        return module

    @property
    def _fuses(self) -> Fuses:
        """Which operators add the gradients that they compute into accumulators. None with a
        compiling backend, which fuses the additions itself.
        """
        if self._backend.compiles:
            return "none"
        return "all" if self._accumulation.fuses else "joined"

    def _with_passes(self, when: When, form: GraphForm, program: SplitGraphs) -> SplitGraphs:
        return dataclasses.replace(program, **self._run_passes(when, form, program))  # type: ignore[arg-type]

    def _run_passes(self, when: When, form: GraphForm, program: SplitGraphs) -> Changed:
        try:
            return run_graph_passes(when, program, form)
        except PassError as error:
            raise SplitError(f"{self._name}: {error}") from error

    def _compile_form(
        self, dtype: torch.dtype | None, form: AddingForm, count: int, parts: Parts
    ) -> Boxed:
        """Compile one form.

        The compiled function takes one list: the arguments, then any accumulators, then the
        report's function if it reports parts. It returns the other results, then any new gradients.
        """
        module = self._source(dtype, form, count, parts)
        name, arguments, wanted = self._name, [*self._arguments], [*self._results]
        if count > 1:
            name, arguments = f"{name}_of_{count}", _of_several(arguments, count)
        if form == "returns":
            wanted += [Role(Kind.PARAMETER_GRAD, name) for name in self.parameters]
        else:
            name = f"{name}_{'accumulating' if form == 'adds' else 'writing'}"
            arguments += [Role(Kind.ACCUMULATOR, name) for name in self.parameters]
            arguments += [REPORT] if parts else []
        graph = compile_graph(name, module, self._backend)
        chosen = GraphForm(self._graph, strides=graph.strides)
        self._run_passes(When.COMPILED, chosen, self._program)
        return graph.with_order(arguments, wanted)


def _of_several(arguments: Sequence[Role], count: int) -> list[Role]:
    """Roles of the arguments of a joined W: the deferred values of each microbatch in turn, then
    parameters and buffers.
    """
    deferred = [role for role in arguments if role.kind not in STATE]
    state = [role for role in arguments if role.kind in STATE]
    return [joined_role(role, at) for at in range(count) for role in deferred] + state
