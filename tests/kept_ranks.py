"""Ranks that stay: what many tests launch runs in the same processes, one call after another."""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autosplit.pipeline.search import within_memory
from benchmarks.kept_ranks import KeptRanks
from tests import devices
from tests.cheap_tracing import trace_cheaply
from tests.interpreters import collect_rarely, rank_processes
from tests.shared_captures import share_captures


def measure_cheaply() -> None:
    """Estimates ask for this machine's rates, which take 0.2 s of large matrices, stages are timed
    for many rounds, and links to offload targets with 8 MiB. Does nothing before they are imported.
    """
    if speed := sys.modules.get("autosplit.mesh.costs"):
        speed._SIDE, speed._COPIED = 128, 2**20  # type: ignore[attr-defined]
    if timing := sys.modules.get("autosplit.planner.costs"):
        timing._MOST = 5  # type: ignore[attr-defined]
    if links := sys.modules.get("autosplit.pipeline.engine.offload_target"):
        links._PIECE, links._SWEPT = 2**14, 2**16  # type: ignore[attr-defined]


def search_cheaply() -> None:
    """Searches within a limit try as much as their time allows, for seconds each, also of the
    smallest pipelines.
    """
    within_memory._WORK = 300


def forget_meshes() -> None:
    """Torch keeps how operators run on DTensors by meshes that are equal to those of an earlier
    call, whose process groups are gone.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


class Ranks(KeptRanks):
    """The ranks of tests; each call begins as in a new process."""

    def __init__(self) -> None:
        super().__init__(rank_processes(), _as_new)

    def __call__(self, fn: Any, nprocs: int, *args: Any, **options: Any) -> list[Any]:
        devices.need(nprocs)
        return super().__call__(fn, nprocs, *args, **options)


def _as_new() -> None:
    devices.use(devices.chosen())
    collect_rarely()
    trace_cheaply()
    measure_cheaply()
    search_cheaply()
    share_captures()
    random.seed(0)
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    forget_meshes()


def ranks(count: int, *, timeout: float = 150.0) -> Callable[[Callable[..., Any]], Any]:
    """A test that each of ``count`` ranks runs; its arguments are parameters only, and what it
    returns, if anything, is wrong.

    Those of a module that were asked for run in one launch, one after another.
    """

    def decorated(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, on_ranks: Ranks, **_parameters: Any) -> None:
            cases = {
                item.name: (item.originalname, item.callspec.params if _has(item) else {})
                for item in request.session.items
                if isinstance(item, pytest.Function)
                and item.module is request.module
                and getattr(item.function, "ranks", None) == count
            }
            result = _outcomes_of(on_ranks, request.module.__name__, count, timeout, cases)
            message = [rank.get(request.node.name, "an earlier one failed") for rank in result]
            assert not any(message), "\n".join(
                f"rank {at}: {item}" for at, item in enumerate(message)
            )

        parameters = [*inspect.signature(body).parameters.values()]
        local = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in _FIXTURES]
        test.__signature__ = inspect.Signature([*parameters, *local])  # type: ignore[attr-defined]
        vars(test).update(ranks=count, body=body)
        return test

    return decorated


_FIXTURES = ("request", "on_ranks")
_outcomes: dict[tuple[str, int], list[dict[str, Any]]] = {}


def _has(item: pytest.Function) -> bool:
    return hasattr(item, "callspec")


def _outcomes_of(
    on_ranks: Ranks, module: str, count: int, timeout: float, cases: dict[str, tuple[str, Any]]
) -> list[dict[str, Any]]:
    """By rank, what is wrong in each case; launched for the first that asks."""
    if (module, count) not in _outcomes:
        _outcomes[module, count] = on_ranks(_run_cases, count, (module, cases), timeout=timeout)
    return _outcomes[module, count]


def _run_cases(module: str, cases: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    results = {}
    for name, (test, inputs) in cases.items():
        torch.manual_seed(0)
        try:
            results[name] = getattr(importlib.import_module(module), test).body(**inputs)
        except Exception:
            results[name] = traceback.format_exc()
        # Ranks that pass would wait in the next case for those that fail.
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, results[name])
        if any(messages):
            break
    return results
