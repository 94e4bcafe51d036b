"""``split``: wrap a module so that its backward computes input gradients only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.autograd.module_proxy import refuse_proxies
from autosplit.passes import CollectiveCosts

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
    backend: str = "eager",
    memory: str | int = "balanced",
    overlap: CollectiveCosts | None = None,
    fullgraph: bool = False,
    max_graphs: int = 64,
    max_pending: float = 1,
) -> SplitModule:
    """Split a model's backward into input gradients and weight gradients.

    Args:
        model: any ``nn.Module``.
        args: example positional inputs, a tuple or one tensor. With example inputs the graph is
            captured here; without, at the first call. A first call that builds submodules or
            fills caches is run as it is, by plain autograd, and the second captured.
        kwargs: example keyword inputs.
        backend: how graphs are run. ``"eager"`` runs their operators one by one, with the bits of
            plain autograd. ``"inductor"`` compiles each graph as ``torch.compile`` would: faster,
            rounding differently, and with random numbers of its own for a seed; what was compiled
            is kept in torch's cache on disk.
        memory: what one microbatch holds. ``"fast"`` does nothing twice. ``"balanced"`` does
            cheap operators again where that frees memory at a fiftieth of the step's time;
            all weight gradients wait, and between I and W only what they need is held.
            ``"lean"`` goes below that: it computes in I the weight gradients that free the most
            bytes for their FLOPs; at least 55% of the FLOPs still wait. A number is a budget,
            the bytes that one microbatch may hold between I and W; what F saves, parameters
            and gradients are not in it. ``report()`` shows what the setting holds. A
            model that is split in parts is split as ``"balanced"``; others raise.
        overlap: what collectives of tensor parallelism take, as ``measure_collectives`` finds it;
            None goes by an estimate. I computes the weight gradients that fit into its waits for
            them. Give all ranks the same.
        fullgraph: refuse what one graph cannot hold. Otherwise such a model is split graph by
            graph under ``torch.compile``, and what no graph holds runs as ordinary autograd;
            ``report()`` says what and why.
        max_graphs: how many graphs to keep (see ``SplitModule``).
        max_pending: how many microbatches (``backward()`` calls) may wait for their weight
            gradients, at least 1. Those of the oldest are computed where the next forward starts,
            so that its own may wait, or at the end of a ``backward()`` that leaves more. Raise it,
            up to ``math.inf``, if you choose yourself when ``backward_weight()`` runs: each one
            that waits holds memory.

    Raises:
        CaptureError: ``fullgraph`` and the model cannot be traced for the example inputs; names
            the line.
        SplitError: ``fullgraph`` and the graph cannot be split; the backend, the memory
            setting is unknown; a memory budget cannot be met; ``max_pending`` is less than 1;
            or this is no module, no inputs.
        ShardedError: the model is sharded in a way that cannot be taken apart, or a parameter is a
            DTensor that cannot be trained.
        FailingCallError: the forward fails for the example inputs, traced or not.
        BackendError: the backend cannot compile a graph.
    """
    if not isinstance(model, nn.Module):
        raise SplitError(f"split takes an nn.Module; got a {type(model).__name__}")
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
        backend=backend,
        memory=memory,
        overlap=overlap,
        fullgraph=fullgraph,
        max_graphs=max_graphs,
        max_pending=max_pending,
    )
    if args or kwargs:
        try:
            module._capture(args, dict(kwargs or {}))
        except (BackendError, FailingCallError, ShardedError):
            raise
        except FirstCallError:  # that call is for the user to make, so nothing has begun
            module._attach()
        except (CaptureError, SplitError) as error:
            # A model in parts is not looked at before it is called.
            if text := misfit(model, args, kwargs or {}):
                told = f"the example inputs do not fit {type(model).__name__}.forward, which"
                raise SplitError(f"{told} {text}") from None
            module._fallback.split_by_graphs(error)
    return module


def _check_kind(model: nn.Module) -> None:
    """Refuse modules whose forward cannot be looked into."""
    refuse_proxies("split", model)
    if any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        raise SplitError(
            "DistributedDataParallel is to be around a split module, not inside of one, where it "
            "would see no backward and ranks would not average: DistributedDataParallel("
            "autosplit.split(module)), or with accelerate, split the model before prepare()"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise SplitError(
            f"{type(model).__name__} is TorchScript, which cannot be traced into a graph of "
            "forward and backward; split the nn.Module that it was made from"
        )
