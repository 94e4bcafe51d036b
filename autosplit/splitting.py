"""``split``: wrap a module so that its backward computes input gradients only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.autograd.module_proxy import refuse_proxies
from autosplit.runtime.options import SplitArguments, SplitOptions, split_options

from .errors import (
    BackendError,
    CaptureError,
    FailingCallError,
    FirstCallError,
    ShardedError,
    SplitError,
)
from .module import SplitModule
from .runtime.refusals import misfit


def split(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: SplitOptions | None = None,
    fullgraph: bool = False,
    max_graphs: int = 64,
    max_pending: float = 1,
    **changes: Unpack[SplitArguments],
) -> SplitModule:
    """Split a model's backward into input gradients (I) and weight gradients (W).

    The returned module trains like the model. ``backward()`` runs I only. Weight gradients are
    computed by ``backward_weight()``, or when ``.grad`` is first read::

        model = autosplit.split(model)
        loss = model(x).square().mean()
        loss.backward()            # I: gradients of x, and of everything before the model
        model.backward_weight()    # W: .grad of the parameters; optional
        optimizer.step()

    Args:
        model: any ``nn.Module``.
        args: example positional inputs: a tuple, or one tensor. With example inputs, the model is
            captured now; without, at its first call. A first call that builds submodules or fills
            caches runs by plain autograd, and the second call is captured.
        kwargs: example keyword inputs of the model.
        options: how the model is split and how its graphs run; None: the defaults.
        fullgraph: whether to refuse a model that cannot be captured in one graph. If False, such a
            model is split graph by graph under ``torch.compile``. Code between graphs runs by plain
            autograd; ``report()`` lists the graph breaks with reasons.
        max_graphs: the largest number of captured graphs that are kept, see ``SplitModule``; at
            least 1.
        max_pending: the number of microbatches (``backward()`` calls) that may wait for their
            weight gradients, at least 1. Beyond that number, the weight gradients of the oldest
            microbatches are computed when a forward starts or a ``backward()`` ends. Each pending
            microbatch holds memory. Set a large number, up to ``math.inf``, to decide yourself when
            ``backward_weight()`` runs.
        changes: fields of ``SplitOptions`` by name, such as ``backend="inductor"``.

    Returns:
        a ``SplitModule`` that shares parameters, buffers and attributes with ``model``.

    Raises:
        CaptureError: with ``fullgraph``, the model cannot be captured for the example inputs; names
            the line.
        SplitError: with ``fullgraph``, the graph cannot be split; an option has a wrong value; the
            memory budget cannot be met; ``max_graphs`` or ``max_pending`` is less than 1; ``model``
            is not a module; or the example inputs do not fit its forward.
        TypeError: an option is unknown; lists the known ones.
        ShardedError: the model is sharded in a way that graphs cannot reproduce, or a parameter is
            a DTensor that cannot be trained.
        FailingCallError: the forward fails for the example inputs.
        BackendError: the backend cannot compile a graph.
    """
    if not isinstance(model, nn.Module):
        raise SplitError(
            f"split takes an nn.Module; got a {type(model).__name__}. Wrap a function in a module"
        )
    _check_kind(model)
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple) or not isinstance(kwargs, Mapping | None):
        raise SplitError(
            "split takes example inputs as a tuple (or one tensor), and keyword inputs as a "
            f"dictionary; got a {type(args).__name__} and a {type(kwargs).__name__}"
        )
    module = SplitModule(
        model,
        split_options(options, changes, ("fullgraph", "max_graphs", "max_pending")),
        fullgraph=fullgraph,
        max_graphs=max_graphs,
        max_pending=max_pending,
    )
    if args or kwargs:
        try:
            module._capture(args, dict(kwargs or {}))
        except (BackendError, FailingCallError, ShardedError):
            raise
        except FirstCallError:  # the user makes the first call, without a graph
            module._attach()
        except (CaptureError, SplitError) as error:
            # A model that is split graph by graph is captured at its first call only.
            if text := misfit(model, args, kwargs or {}):
                name = f"{type(model).__name__}.forward"
                raise SplitError(f"the example inputs do not fit {name}, which {text}") from None
            module._fallback.split_by_graphs(error)
    return module


def _check_kind(model: nn.Module) -> None:
    """Refuse kinds of modules that cannot be captured, whatever the inputs.

    Raises:
        SplitError: says what to split instead.
    """
    refuse_proxies("split", model)
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise SplitError(
            "a split module cannot contain DistributedDataParallel, which would see no backward, "
            "so that ranks would not average gradients. Wrap the split module instead: "
            "DistributedDataParallel(autosplit.split(module)); with accelerate, split the model "
            "before prepare()"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise SplitError(
            f"{type(model).__name__} is TorchScript, which has no forward that can be captured; "
            "split the nn.Module from which it was scripted or traced"
        )
