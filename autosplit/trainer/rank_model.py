"""One rank's part of the model: its modules, parameters, gradients and optimizer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.schedule.schedule import BACKWARDS, Schedule
from autosplit.pipeline.simulation.collectives import StageCollectives
from autosplit.ranks.groups import Groups
from autosplit.stage import Stage
from autosplit.torch_internals.dtensor import is_dtensor, local_tensor, redistribute_gradient
from autosplit.torch_internals.gradients import scale_together
from autosplit.torch_internals.state import StateReader
from autosplit.trainer.gradient_buckets import GradientBuckets, Wait
from autosplit.trainer.gradient_norms import GradientNorms, are_small
from autosplit.trainer.replicated_parameters import ReplicatedParameters
from autosplit.trainer.sharded_stages import ShardedStages
from autosplit.trainer.stage_modules import Holder, StageSource
from autosplit.trainer.stage_start import agree_on_start, build_seeded_modules

OptimizerFunction: TypeAlias = "Callable[[list[Any]], torch.optim.Optimizer]"
"""Builds an optimizer of a list of parameters, or of a list of (name, parameter) if its argument is
called ``named`` or ``named_parameters``.
"""
ShardFunction: TypeAlias = "Callable[[Mapping[int, nn.Module]], frozenset[int]]"
"""Shards a rank's stages, by index; returns the ``id`` of trained parameters that stay whole."""
_NAMED_ARGUMENTS = ("named", "named_parameters")


class RankModel:
    """This rank's stage modules and trained parameters, with their gradients and their optimizer.

    A step calls, in this order:

        check                 the user has not changed which parameters are trained
        reducing_gradients    around the actions: sums ``.grad`` over copies at its end
        gradient_norms        of the reduced gradients
        post_step             buffers of replicas become equal
        step                  gradients are clipped, the optimizer updates parameters

    Collective: all ranks must construct it together.

    Args:
        stages: the source of all stages.
        shared: groups of (stage, parameter name); each group is one tied parameter of the model.
        schedule: the schedule, whose placement says which rank has which stage.
        groups: the trainer's process groups.
        device: the device of the modules.
        synchronize: a function that waits until the device has finished.
        shard: shards the modules; None: the trainer shards nothing.

    Attributes:
        modules: this rank's modules by stage.
        parameters: the parameters that need a gradient, each once.
        optimizer: updates ``parameters``; None before ``build_optimizer``, and on a rank without
            parameters to train.
        sharded: the stages that ``fully_shard`` has sharded.
        buckets: the buffers of the gradients that are reduced over copies.
        post_step: functions to call after the actions of a step.
        reduces: whether a step reduces gradients over copies of tied parameters or over other
            ranks.
        counts_all: whether the norm of the model's gradient counts all parameters of this rank.

    Raises:
        PipelineError: a stage is not a module; also raises the errors of ``ShardedStages`` and
            ``ReplicatedParameters``.
    """

    def __init__(
        self,
        stages: StageSource,
        shared: Sequence[Sequence[Holder]],
        schedule: Schedule,
        groups: Groups,
        device: torch.device,
        synchronize: Callable[[], None],
        shard: ShardFunction | None = None,
    ) -> None:
        modules, drew = build_seeded_modules(stages.build, schedule.stages_on(groups.rank), device)
        self.modules, self._has_model_names = modules, stages.wiring is not None
        self._groups = groups
        self._first_holders = {tuple(at): holders[0] for holders in shared for at in holders}
        for index, module in modules.items():
            if not isinstance(module, nn.Module):
                raise PipelineError(
                    f"stage {index} must be an nn.Module; got a {type(module).__name__}"
                )
            _check_tied(index, module, shared)
            modules[index] = module.to(device)
        agree_on_start(modules, shared, groups, drew=drew)
        whole = frozenset[int]() if shard is None else shard(modules)
        self.sharded = sharded = ShardedStages(modules, groups, synchronize, whole)
        copies = ReplicatedParameters(modules, shared, schedule, groups, sharded.gathered_shardings)
        parameters_of = {stage: [*module.parameters()] for stage, module in modules.items()}
        self.buckets = GradientBuckets(copies.reduced, parameters_of, groups, synchronize)
        # Each shard's gradient is the mean over the shares of the batch already.
        self._tied_shards = GradientBuckets(copies.tied_shards, {}, groups, synchronize, shares=1)
        self._tied = copies if shared else None
        has_shards, has_replicas = bool(sharded.parameters), groups.layout.shares > 1
        self._checks = [
            *([copies.check_hooks] if shared or has_shards else []),
            *([sharded.check_reduction, sharded.free_all] if has_shards else []),
        ]
        self.post_step = [
            *([synchronize] if device.type == "cuda" else []),
            *([sharded.free_all] if has_shards else []),
            *([copies.broadcast_buffers] if has_replicas else []),
        ]
        self._reductions: list[Callable[[], Sequence[Wait]]] = [
            *([self.buckets.start] if copies.reduced else []),
            *([lambda: [sharded.start()]] if has_shards else []),
            *([lambda: [self._sum_tied_shards]] if copies.tied_shards else []),
        ]
        self.parameters = _trainable(modules.values())
        self._has_small_gradients = are_small(self.parameters)
        self._has_dtensors = any(map(is_dtensor, self.parameters))
        self.reduces = bool(self._reductions) or self._has_dtensors
        self._counted = [p for p in self.parameters if copies.is_counted(p)]
        self.counts_all = len(self._counted) == len(self.parameters)
        self._parameter_ids = frozenset(map(id, self.parameters))
        self._state_readers = {stage: StateReader(module) for stage, module in modules.items()}
        self.optimizer: torch.optim.Optimizer | None = None

    def arrange_buckets(self, stages: Mapping[int, Stage], schedule: Schedule) -> None:
        """Order gradients in their buffers by the order in which a step completes them; collective
        over all ranks.

        Args:
            stages: this rank's stages with graphs.
            schedule: the schedule of the step.
        """
        names = {
            index: stage.functions.backward_graphs.completion_order
            for index, stage in stages.items()
        }
        for part in reversed(self._groups.everybody.gather(names)):  # the first rank decides
            names |= {index: part[index] for index in names.keys() & part.keys()}
        order = [
            stages[index].module.get_parameter(name)
            for index in self._last_weights(schedule)
            for name in names.get(index, ())
        ]
        sum_dtype = next((stage.grad_dtype for stage in stages.values()), None)
        self.buckets.arrange({id(p): at for at, p in enumerate(order)}, sum_dtype)

    def report_gradients(self, stages: Mapping[int, Stage], schedule: Schedule) -> None:
        """Make the last W of each stage start the reductions of the buckets that it completes.

        Args:
            stages: this rank's stages with graphs.
            schedule: the schedule of the step.
        """
        for index, microbatch in self._last_weights(schedule).items():
            if index in stages:
                report = self.buckets.report_for(index, stages[index].module)
                stages[index].report_completion(microbatch, report)

    def collectives(self) -> dict[int, StageCollectives]:
        """Measure the collectives over parameters and gradients of this rank's stages; collective
        over all ranks.
        """
        return self.buckets.measure_reductions() | self.sharded.measure_gathers()

    def _last_weights(self, schedule: Schedule) -> dict[int, int]:
        """Map each stage to the microbatch of its last W (or B) in a step. Stages are in the order
        of their last Ws.
        """
        row = schedule.ranks[self._groups.rank]
        backwards = [action for action in row if action.kind in BACKWARDS]
        last = {action.stage: action for action in backwards}
        return {a.stage: a.microbatch for a in backwards if a is last[a.stage]}

    def build_optimizer(self, optimizer_fn: OptimizerFunction) -> None:
        """Build the optimizer, if the rank has parameters to train; collective if parameters are
        tied.

        Raises:
            PipelineError: ``optimizer_fn`` returns no optimizer; or the optimizer has other
                parameters, needs a closure, or has other options for a tied parameter than another
                rank's.
        """
        if self.parameters:
            named = _takes_names(optimizer_fn)
            self.optimizer = optimizer_fn(self.named_parameters() if named else self.parameters)
            _check_optimizer(self.optimizer, self.parameters)
        if self._tied is not None:
            self._tied.check_optimizers(self.optimizer)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return ``parameters`` with their names in the whole model. In a list of stages they begin
        with the stage's index, as in an ``nn.Sequential`` of the stages.

        A tied parameter has one name on all ranks, the first of its names in the whole model. So
        groups that are made by names have it in the same group everywhere.
        """
        named = [
            (self._model_name(stage, name), parameter)
            for stage, module in self.modules.items()
            for name, parameter in module.named_parameters()
        ]
        first_names = {id(parameter): name for name, parameter in reversed(named)}
        return [(first_names[id(parameter)], parameter) for parameter in self.parameters]

    def _model_name(self, stage: int, name: str) -> str:
        """Return the first name in the whole model of a stage's parameter."""
        if self._has_model_names:
            first_names: Mapping[str, str] = getattr(self.modules[stage], "first_names", {})
            return first_names.get(name, name)
        stage, name = self._first_holders.get((stage, name), (stage, name))
        return f"{stage}.{name}"

    @property
    def optimizer_state(self) -> list[Tensor]:
        """The tensors of the optimizer's state."""
        states = {} if self.optimizer is None else self.optimizer.state
        values = (value for state in states.values() for value in state.values())
        return [value for value in values if isinstance(value, Tensor)]

    def step(
        self, max_norm: float | None, norm: float | None, barrier: Callable[[], None] | None = None
    ) -> None:
        """Clip the gradients, call the optimizer, wait for all ranks, and drop the gradients.

        Args:
            max_norm: the norm to which the gradient of the whole model is clipped; None does not
                clip.
            norm: the norm of the whole model's gradient before clipping.
            barrier: a function that returns when every rank has called it, and raises if a rank
                fails; None: do not wait for other ranks.
        """
        if max_norm is not None and norm is not None:
            _clip(self.parameters, max_norm, norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if barrier is not None:
            barrier()
        self.drop_gradients()

    def check_parameters(self) -> None:
        """Check that no parameter is trained that was not when the trainer was built. Also run the
        step's other checks, such as ``check_hooks``.

        No optimizer would update a newly trained parameter, no norm would count it, and its copies
        would become different.

        Raises:
            PipelineError: names a newly trained parameter.
        """
        for call in self._checks:
            call()
        for stage, reader in self._state_readers.items():
            for name, tensor in reader.read().items():
                is_new = tensor.requires_grad and id(tensor) not in self._parameter_ids
                if is_new and isinstance(tensor, nn.Parameter):  # else a buffer
                    raise PipelineError(
                        f"parameter {name!r} of stage {stage} was unfrozen, added or replaced "
                        "after the trainer was built, and is not in its optimizer: build a new "
                        "trainer, or copy values into the existing parameters (load_state_dict "
                        "without assign=True)"
                    )

    def restore_process_groups(self) -> None:
        """Restore the process groups that sharded modules had before the trainer."""
        self.sharded.restore_process_groups()

    def gradient_norms(self, *, squares: bool) -> GradientNorms:
        """Start computing the norms of this rank's gradients; see ``GradientNorms``.

        Args:
            squares: whether to compute the sum of squares, which counts each parameter of the model
                on one rank only. Without it, all parameters of this rank are included.
        """
        counted = self._counted if squares else self.parameters
        return GradientNorms(counted, squares=squares, small=self._has_small_gradients)

    def nonfinite_stage(self, norms: GradientNorms) -> int | None:
        """Return the last of this rank's stages with a gradient that is not finite; None if all are
        finite.
        """
        nonfinite = {*map(id, norms.nonfinite())}
        for stage, module in sorted(self.modules.items(), reverse=True) if nonfinite else ():
            if any(id(parameter) in nonfinite for parameter in module.parameters()):
                return stage
        return None

    def drop_gradients(self) -> None:
        """Drop all gradients, including gradients of parameters that are not in the optimizer.

        Gradients outside of the optimizer would grow with every step, and count in the norm.
        """
        optimizer = self.optimizer
        if (
            optimizer is not None
            and type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        ):
            optimizer.zero_grad(set_to_none=True)  # it may do more
        for parameter in self.parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Context that sets gradients of earlier steps aside, so that others can be computed. At
        its end, it restores the earlier gradients and all buffers.
        """
        gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        buffers = [buffer for module in self.modules.values() for buffer in module.buffers()]
        values = [buffer.clone() for buffer in buffers]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for buffer, value in zip(buffers, values, strict=True):
                buffer.detach().copy_(value)

    @contextlib.contextmanager
    def reducing_gradients(self, scale: float = 1.0) -> Iterator[None]:
        """Context that reduces, at its end, the gradients that are computed inside.

        Afterwards each copy of a tied parameter has the sum of the gradients of all copies, and
        each replica of the pipeline has the mean over replicas. All are divided by the scale.
        Gradients of earlier steps are added once, after the reduction, so that steps can
        accumulate. After an error, only gradients of earlier steps remain.

        The reduction of a bucket starts in the last W that adds to it. Other reductions start after
        the rank's last action.

        Args:
            scale: the scale of the losses.

        Raises:
            LostPeerError: another rank did not take part.
        """
        earlier_gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        for parameter, _ in earlier_gradients:
            parameter.grad = None
        self.buckets.begin()
        try:
            self.sharded.gather_first()
            yield
            for wait in [wait for start in self._reductions for wait in start()]:
                wait()
        except BaseException:
            for parameter, earlier in earlier_gradients:
                parameter.grad = earlier
            self.sharded.forget()
            self.buckets.release()
            raise
        if self._has_dtensors:
            for parameter, _ in earlier_gradients:
                redistribute_gradient(parameter)
        if scale != 1.0:
            gradients = (parameter.grad for parameter, _ in earlier_gradients)
            scale_together([local_tensor(g) for g in gradients if g is not None], 1.0 / scale)
        for parameter, earlier in earlier_gradients:
            if earlier is not None:
                parameter.grad = self._add_earlier(parameter, earlier)

    def _sum_tied_shards(self) -> None:
        """Sum the reduced gradients of sharded parameters over the stages that have them."""
        self._tied_shards.begin()
        for wait in self._tied_shards.start():
            wait()

    @torch.no_grad()
    def _add_earlier(self, parameter: nn.Parameter, earlier: Tensor) -> Tensor:
        """Return the sum of a step's gradient and the gradient of earlier steps. The earlier tensor
        is not changed.
        """
        new = parameter.grad
        if new is None:
            return earlier
        return new.add_(earlier) if self.buckets.has_place(parameter) else earlier + new


def _check_tied(index: int, module: nn.Module, shared: Sequence[Sequence[Holder]]) -> None:
    """Check that parameters which a stage's modules tie to other stages are in ``shared``.

    Raises:
        PipelineError: names a parameter that is missing in ``shared``.
    """
    named = {holder for group in shared for holder in group}
    for name in getattr(module, "tied_elsewhere", ()):
        if (index, name) not in named:
            raise PipelineError(
                f"{name!r} of stage {index} is tied to a parameter of another stage, and "
                "shared_parameters does not have it: build the trainer by plan.trainer(...), or "
                "pass StageOptions(shared_parameters=plan.shared)"
            )


def _trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that need a gradient, each once."""
    trained = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(trained.values())


_DOUBLE = (torch.float64, torch.complex128)


def _clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale this rank's gradients in place by max_norm / norm, if ``norm`` is greater.

    This is the rule of ``torch.nn.utils.clip_grad_norm_`` for the norm of the whole model.
    """
    # This rank's part of a DTensor can be scaled by a plain number.
    terms: Any = [
        _NormTerm(local_tensor(parameter.grad))
        for parameter in parameters
        if parameter.grad is not None
    ]
    is_double = any(term.grad.dtype in _DOUBLE for term in terms)
    dtype = torch.float64 if is_double else torch.float32
    total: Tensor = torch.tensor(norm, dtype=dtype, device="cpu")
    torch.nn.utils.clip_grads_with_norm_(terms, max_norm, total)


class _NormTerm(NamedTuple):
    """A gradient as ``.grad`` of an object, which torch's clipping accepts as a parameter."""

    grad: Tensor


def _takes_names(optimizer_fn: Callable[..., object]) -> bool:
    """Whether the function's first argument is called ``named`` or ``named_parameters``."""
    try:
        names = [*inspect.signature(optimizer_fn).parameters]
    except (TypeError, ValueError):  # a builtin has no signature
        return False
    return bool(names) and names[0] in _NAMED_ARGUMENTS


def _needs_closure(optimizer: Any) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _check_optimizer(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Check that an optimizer can run without a closure, and has only this rank's parameters.

    Raises:
        PipelineError: the optimizer needs a closure, or has parameters of other ranks.
    """
    if not hasattr(optimizer, "param_groups"):
        raise PipelineError(
            f"optimizer_fn must return a torch.optim.Optimizer; got a {type(optimizer).__name__}"
        )
    if _needs_closure(optimizer):
        raise PipelineError(
            f"{type(optimizer).__name__} runs the model again in its step(closure), which a "
            "pipeline cannot do within a step: use an optimizer with step(), such as "
            "torch.optim.AdamW"
        )
    expected = set(map(id, parameters))
    updated = [id(p) for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(parameter not in expected for parameter in updated)
    if foreign:
        raise PipelineError(
            f"optimizer_fn built an optimizer of {len(updated)} parameters, {foreign} of which are "
            "not this rank's: build it from the list that optimizer_fn is called with"
        )
