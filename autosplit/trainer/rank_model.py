"""One rank's share of the model in training: what moves it, and keeps it equal with others."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.errors import PipelineError
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.ranks.groups import Groups
from autosplit.torch_internals.dtensor import is_dtensor, local_tensor, redistribute_gradient
from autosplit.trainer.gradient_norms import GradientNorms
from autosplit.trainer.replicated_parameters import ReplicatedParameters, Wait
from autosplit.trainer.sharded_stages import ShardedStages
from autosplit.trainer.stage_modules import Holder, StageSource
from autosplit.trainer.stage_start import agree_on_start, build_apart

OptimizerFunction = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class RankModel:
    """This rank's stage modules and trainable parameters, kept equal with their replicas.

    Creating one is collective over all ranks.

    Args:
        stages: all stages.
        shared: groups of (stage, parameter name); every group is one parameter of the model.
        schedule: says which rank holds which stage.
        groups: the trainer's process groups.
        device: where the stages go.
        synchronize: waits until the device has done what it was given.

    Attributes:
        modules: by stage.
        parameters: those that need a gradient, each once.
        optimizer: moves them, once it was taken; None if there are none.
        sharded: the stages that are sharded.
        pre_step: what comes before the actions of a step, call by call.
        post_step: what follows them.
        reduces: whether gradients are summed with those of other copies or ranks in a step.

    Raises:
        PipelineError: a stage is no module, or sharded stages share parameters; and the errors of
            ``ShardedStages`` and ``ReplicatedParameters``.
    """

    def __init__(
        self,
        stages: StageSource,
        shared: Sequence[Sequence[Holder]],
        schedule: Schedule,
        groups: Groups,
        device: torch.device,
        synchronize: Callable[[], None],
    ) -> None:
        modules, drew = build_apart(stages.build, schedule.held(groups.rank), device)
        self.modules = modules
        for index, module in modules.items():
            if not isinstance(module, nn.Module):
                raise PipelineError(
                    f"stage {index} must be an nn.Module; got a {type(module).__name__}"
                )
            _check_tied(index, module, shared)
            modules[index] = module.to(device)
        agree_on_start(modules, shared, groups, drew=drew)
        self.sharded = sharded = ShardedStages(modules, groups, synchronize)
        if sharded.parameters and shared:
            raise PipelineError(
                "parameters that fully_shard has sharded are shared by several stages "
                "(shared_parameters), whose gradients would have to be summed across both: take "
                "'dp_replicate' in place of 'dp_shard', or stages that have parameters of their own"
            )
        copies = ReplicatedParameters(
            modules, shared, schedule, groups, sharded.gathered_shardings, synchronize
        )
        self._tied = copies if shared else None
        shards, several = bool(sharded.parameters), groups.layout.shares > 1
        self._checks = [
            *([copies.check_hooks] if shared else []),
            *([sharded.check, sharded.free_all] if shards else []),
        ]
        self.pre_step = [sharded.gather_all] if shards else []
        self.post_step = [
            *([synchronize] if device.type == "cuda" else []),
            *([sharded.free_all] if shards else []),
            *([copies.broadcast_buffers] if several else []),
        ]
        self._reductions: list[Callable[[], Wait]] = [
            *copies.reductions,
            *([sharded.start] if shards else []),
        ]
        self.parameters = _trainable(modules.values())
        self._lie_apart = any(map(is_dtensor, self.parameters))
        self.reduces = bool(self._reductions) or self._lie_apart
        # Of replicas, the first one's are counted.
        self._counted = [p for p in self.parameters if copies.is_counted(p)]
        self._known = frozenset(map(id, self.parameters))
        self.optimizer: torch.optim.Optimizer | None = None

    def take_optimizer(self, optimizer_fn: OptimizerFunction) -> None:
        """Have the optimizer made that moves the parameters, if there are any.

        Raises:
            PipelineError: this is no optimizer, one of other parameters, one that wants a
                closure, or one that moves a tied parameter otherwise than another rank's.
        """
        if self.parameters:
            self.optimizer = optimizer_fn(self.parameters)
            _check_moves(self.optimizer, self.parameters)
        if self._tied is not None:
            self._tied.check_optimizers(self.optimizer)

    @property
    def optimizer_state(self) -> list[Tensor]:
        """The tensors of the optimizer's state."""
        found = {} if self.optimizer is None else self.optimizer.state
        values = (value for each in found.values() for value in each.values())
        return [value for value in values if isinstance(value, Tensor)]

    def step(
        self, max_norm: float | None, norm: float | None, agree: Callable[[], None] | None = None
    ) -> None:
        """Clip, move and clear the gradients, and hear that all ranks have done so.

        Args:
            max_norm: clips the norm of the whole model's gradient to this; None does not clip.
            norm: what it is.
            agree: comes back when every rank has called it, raises if one did not; None: whatever
                other ranks do, if there are any.
        """
        if max_norm is not None and norm is not None:
            _clip(self.parameters, max_norm, norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if agree is not None:
            agree()
        self.drop_gradients()

    def check(self) -> None:
        """Refuse parameters that are trained now and were not when this was made: no optimizer
        moves them, no norm counts them and no copies are kept equal.

        Raises:
            PipelineError: names one.
        """
        for call in self._checks:
            call()
        for stage, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise PipelineError(
                        f"parameter {name!r} of stage {stage} was unfrozen, added or replaced "
                        "after the trainer was built, and its optimizer does not know it: build a "
                        "new trainer, or put values into the parameters that are there "
                        "(load_state_dict without assign=True)"
                    )

    def close(self) -> None:
        """Let sharded modules communicate as before."""
        self.sharded.close()

    def norms(self, *, squares: bool) -> GradientNorms:
        """The norms of this rank's gradients.

        Args:
            squares: whether their squares are asked for, in which each parameter of the model
                counts once; without it copies are asked, too.
        """
        return GradientNorms(self._counted if squares else self.parameters, squares=squares)

    def nonfinite_stage(self, norms: GradientNorms) -> int | None:
        """The last of this rank's stages that has a gradient with a number that is not finite."""
        found = {*map(id, norms.nonfinite())}
        stages = (
            stage
            for stage, module in sorted(self.modules.items(), reverse=True)
            if found and any(id(each) in found for each in module.parameters())
        )
        return next(stages, None)

    def drop_gradients(self) -> None:
        """Drop all gradients, also of parameters that the optimizer does not move: theirs would
        add up for ever, and count in the norm.
        """
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def reduced(self) -> Iterator[None]:
        """Give every copy of a parameter the sum of the gradients that come inside, and all
        replicas of the pipeline their mean.

        What was there before stays, once, so that steps can accumulate. After an error, only that
        is there. Reductions start behind the last action of a rank: started beside Ws that
        remained, they made steps of replicas no shorter.

        Raises:
            LostPeerError: another rank did not take part.
        """
        before = [(each, each.grad) for each in self.parameters]
        for each, _ in before:
            each.grad = None
        try:
            yield
            for wait in [start() for start in self._reductions]:
                wait()
        except BaseException:
            for each, earlier in before:
                each.grad = earlier
            self.sharded.forget()
            raise
        for each, earlier in before:
            if self._lie_apart:
                redistribute_gradient(each)
            if earlier is not None:
                with torch.no_grad():
                    each.grad = earlier if each.grad is None else earlier + each.grad


def _check_tied(index: int, module: nn.Module, shared: Sequence[Sequence[Holder]]) -> None:
    """Of a model that was cut, parameters of several stages are not to train apart."""
    named = {holder for group in shared for holder in group}
    for name in getattr(module, "tied_elsewhere", ()):
        if (index, name) not in named:
            raise PipelineError(
                f"{name!r} of stage {index} is tied to a parameter of another stage: train by "
                "plan.trainer(...), or pass StageOptions(shared_parameters=plan.shared)"
            )


def _trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Parameters that need a gradient, each once."""
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(found.values())


def _clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale gradients in place by max_norm / norm if ``norm``, that of the model, is greater.

    The same rule as ``torch.nn.utils.clip_grad_norm_``, applied to this rank's share.
    """
    total: Tensor = torch.tensor(norm, device="cpu")
    # Of DTensors this rank's parts, which the plain number can be multiplied with.
    parts: Any = [
        _NormTerm(local_tensor(each.grad)) for each in parameters if each.grad is not None
    ]
    torch.nn.utils.clip_grads_with_norm_(parts, max_norm, total)


class _NormTerm(NamedTuple):
    grad: Tensor


def _wants_closure(optimizer: Any) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _check_moves(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Other parameters get no gradient, and nobody would move these."""
    if not hasattr(optimizer, "param_groups"):
        raise PipelineError(
            f"optimizer_fn must return a torch.optim.Optimizer; got a {type(optimizer).__name__}"
        )
    if _wants_closure(optimizer):
        raise PipelineError(
            f"{type(optimizer).__name__} runs the model again in its step(closure), which a "
            "pipeline cannot do within a step: take an optimizer with step(), such as "
            "torch.optim.AdamW"
        )
    given = set(map(id, parameters))
    moved = [id(p) for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(each not in given for each in moved)
    if foreign:
        raise PipelineError(
            f"optimizer_fn built an optimizer of {len(moved)} parameters, {foreign} of which it "
            "was not given: build it of the list that it is called with, this rank's parameters"
        )
