"""Fixtures for all tests.

Nothing here imports torch before tests are collected, which the process that hands them out to
others leaves to these.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import devices, strict_group
from tests.by_folder import by_folder
from tests.interpreters import Servers, collect_rarely

if TYPE_CHECKING:
    from tests.kept_ranks import Ranks

# Inductor's pool of processes takes longer to start than all that tests compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Every connection of a rank to a store asks for the name of 127.0.0.1, which no test reads. By
# default, a name server that loses one question in fifty delays its ranks by five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
collect_rarely()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        help=f"where tests run: {', '.join(devices.KNOWN)} (tests/fake_accelerator)",
    )
    parser.addoption(
        "--comm",
        default="gloo",
        help="what ranks communicate over: gloo, or strict, with the rules of NCCL, such as "
        "strict:ms=2,seed=7 (tests/strict_group)",
    )


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--device")
    if message := devices.refusal(name):
        raise pytest.UsageError(message)
    devices.use(name)
    os.environ[strict_group.VARIABLE] = config.getoption("--comm")
    try:
        settings = strict_group.chosen()
    except ValueError as error:
        raise pytest.UsageError(f"--comm: {error}") from error
    if settings is not None:
        from tests.strict_group.group import use

        use()
    if places := getattr(config, "workerinput", {}).get("servers"):
        Servers(tuple(places)).join()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of pytest-xdist start others from the same two, which import torch once."""
    node.workerinput["servers"] = Servers.running().places


@pytest.fixture(autouse=True, scope="module")
def _earlier_objects_are_frozen() -> None:
    """Tests that collect all garbage go through what their module has made, and not through torch
    and all other tests, for half a second each.
    """
    gc.freeze()


# Tests of these are about what runs graphs, and what trainers do with stages, whatever is in the
# graphs.
_SHARE_CAPTURES = (
    "autograd", "checkpoint", "mesh", "pipeline", "pipelining", "recorder", "runtime", "trainer",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread_and_seed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Bit-for-bit comparisons need one reduction order; two cores need no oversubscription."""
    import torch

    from tests.cheap_tracing import seed_cheaply, trace_cheaply
    from tests.kept_ranks import measure_cheaply, search_cheaply
    from tests.shared_captures import share_captures

    seed_cheaply()
    earlier = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trace_cheaply()
    measure_cheaply()
    search_cheaply()
    folder, *_ = request.path.relative_to(Path(__file__).parent).parts
    share_captures(folder in _SHARE_CAPTURES)
    yield
    torch.set_num_threads(earlier)


@pytest.fixture(autouse=True)
def _a_device_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what tests ``launch`` themselves."""
    if devices.chosen() == "cpu":
        return
    from autosplit.ranks.launch import launch

    def launched(fn: Any, nprocs: int, *args: Any, **kwargs: Any) -> Any:
        devices.need(nprocs)
        return launch(fn, nprocs, *args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("tests.") and vars(module).get("launch") is launch:
            monkeypatch.setattr(module, "launch", launched)


@pytest.fixture(autouse=True)
def _own_recompilations() -> Iterator[None]:
    """Before torch 2.13, which has ``isolate_recompiles``, all models of a class have one limit of
    recompilations, beyond which they run as ordinary Python.
    """
    yield
    import torch

    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Ranks]:
    """``launch``, in processes that stay for the next test."""
    from tests.kept_ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.end()


@pytest.fixture
def launched_on_ranks(on_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that have imported ``launch`` call ``on_ranks``; later imports do not."""
    from autosplit.ranks.launch import launch

    names = [
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__dict__", {}).get("launch") is launch
        and not name.startswith(("autosplit.pipeline", __name__))
    ]
    assert names, "nobody has imported launch"
    for name in names:
        monkeypatch.setattr(sys.modules[name], "launch", on_ranks)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    on, over = devices.chosen(), os.environ[strict_group.VARIABLE]
    if (on, over) != ("cpu", "gloo"):
        terminalreporter.section(f"on {on} over {over}")
        terminalreporter.write_line(by_folder(terminalreporter.stats))


def pytest_sessionfinish() -> None:
    """pytest collects garbage five times in the end, each time through all that was imported, and
    the process ends anyway.
    """
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        why = devices.why_not(path)
        if why and "gpu" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"on the CPU only: {why}"))
        if message := strict_group.why_not(path):
            item.add_marker(pytest.mark.skip(reason=f"over Gloo only: {message}"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
