"""The default process group: who is in it, its device and size, and plain data over it.

What ranks of one machine say to each other stays on it: their sockets no other host reaches. Ranks
that torchrun starts, and starts again, find those of the same start.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from datetime import timedelta
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from autosplit.errors import PipelineError
from autosplit.ranks.board import RETURNED, Board, Process, describe_error
from autosplit.ranks.control import gather_in

# Whoever loses a peer looks this long for what became of it.
_PATIENCE = 1.0
_LOOK_EVERY = 0.01
_LONGEST = 10**8  # seconds; torch's clocks end at some more


def gather(value: object) -> list[Any]:
    """``value`` of every process, by rank. Collective.

    Raises:
        PipelineError: a process did not take part; it names one that has ended.
    """
    with _naming_the_lost():
        return gather_in(value, None)


def board_of_world() -> Board:
    """What the ranks of the default process group leave for each other."""
    world = dist.group.WORLD
    if world is None:
        raise PipelineError("there is no default process group")
    return Board(world.get_group_store())


@contextlib.contextmanager
def _naming_the_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        ranks = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        found = await_ending(board_of_world(), ranks, _PATIENCE) or "lost the other ranks"
        reason = str(error).partition(". ")[0].partition("\n")[0]
        raise PipelineError(f"{found}, and rank {dist.get_rank()} needs it: {reason}") from error


def await_ending(board: Board, ranks: Iterable[int], seconds: float) -> str:
    """Which of some ranks has ended and how, as soon as one has; empty if none does in time."""
    others, deadline = list(ranks), time.monotonic() + seconds
    while True:
        for rank in others:
            if how := board.ending(rank):
                return f"rank {rank} {how}"
        if time.monotonic() > deadline:
            return ""
        time.sleep(_LOOK_EVERY)


def process_count(ranks: int | None, stages: int) -> int:
    """How many processes hold the ``stages`` stages.

    Args:
        ranks: what the user asked for; None takes the size of the default process group.

    Raises:
        PipelineError: no process group where one is needed, or a count that does not fit.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if ranks is None and world is None and stages > 1:
        raise PipelineError(
            f"{stages} stages need a process group and there is none: run under "
            f"'torchrun --nproc-per-node {stages}' inside autosplit.pipeline.process_group(), or "
            "through autosplit.pipeline.launch; ranks=1 holds all stages in this one process"
        )
    count = (world or 1) if ranks is None else ranks
    if not 1 <= count <= stages:
        raise PipelineError(
            f"{count} processes cannot hold {stages} stages: each needs at least one stage; "
            f"start at most {stages}, cut the model into more stages, or have the others "
            "train replicas (mesh= with pp and dp_replicate)"
        )
    if count > 1 and count != world:
        raise PipelineError(
            f"ranks={ranks} but the process group has {world or 'no'} processes: "
            "leave ranks out to use them all, or say ranks=1 for one process"
        )
    return count


_ADDRESS = "127.0.0.1"
_NAMES = ("lo", "lo0")


def is_positive(value: object, below: float = math.inf) -> bool:
    """Whether this is a number between 0 and another, and not True."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= below


def wait_limit(timeout: float) -> timedelta:
    """How long a wait may take, as torch is told.

    Raises:
        PipelineError: no such number of seconds.
    """
    if not is_positive(timeout, _LONGEST):
        raise PipelineError(
            f"timeout is a positive number of seconds, at most {_LONGEST:,}; got {timeout!r}"
        )
    return timedelta(seconds=timeout)


def serve_store(timeout: float) -> dist.TCPStore:  # type: ignore[name-defined]  # not in __all__
    """A store that processes of this machine reach, on ``store.port``.

    Left to itself, TCPStore listens on all interfaces, so it gets a socket that is bound already.

    Args:
        timeout: seconds for a wait.
    """
    with socket.socket() as listener:
        listener.bind((_ADDRESS, 0))
        return dist.TCPStore(  # type: ignore[attr-defined]  # documented, but not in __all__
            _ADDRESS,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=wait_limit(timeout),
            master_listen_fd=listener.detach(),
        )


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Have process groups that are made inside listen on the loopback interface.

    Gloo takes that of the machine's name otherwise, NCCL any. Whoever has named one is obeyed.
    """
    interface = next((name for _, name in socket.if_nameindex() if name in _NAMES), None)
    wanted = {"GLOO_SOCKET_IFNAME": f"{interface}", "NCCL_SOCKET_IFNAME": f"={interface}"}
    added = [name for name in wanted if interface is not None and name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def process_group(timeout: float = 300.0) -> Iterator[None]:
    """The default process group of a rank started by torchrun or ``launch``.

    Functions run by ``launch`` are inside one already. NCCL for CUDA tensors where every rank of
    this machine has a GPU of its own, which becomes the current device; Gloo for the rest. Where
    all ranks are on one machine, they listen on its loopback interface only, unless
    ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` name another.

    Args:
        timeout: seconds for a wait.

    Raises:
        PipelineError: the process was started by neither.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise PipelineError(
            "this process has no rank (RANK and WORLD_SIZE are not set): start it with torchrun, "
            "or use autosplit.pipeline.launch"
        )
    limit = wait_limit(timeout)
    local, here = (int(os.environ.get(f"LOCAL_{name}", 0)) for name in ("RANK", "WORLD_SIZE"))
    backend = "gloo"
    if dist.is_nccl_available() and torch.cuda.device_count() >= max(here, local + 1):
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    alone = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
    with on_loopback() if alone else contextlib.nullcontext():
        _initialise(backend, limit)
        board = board_of_world()
        rank = dist.get_rank()
        board.enter(rank, Process.of(os.getpid()))
        board.put("words", rank, "")  # an earlier group may have ended
        try:
            yield
        except BaseException as error:
            board.put("words", rank, f"raised {describe_error(error)}")
            raise
        else:
            board.put("words", rank, RETURNED)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _initialise(backend: str, timeout: timedelta) -> None:
    """Make the default process group.

    torchrun's agent has one store for all attempts, in which ranks that it has started again would
    find the addresses of those that are gone, and wait for them. So each attempt has its own keys.
    """
    store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    attempt = "0"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        shared = dist.PrefixStore("attempts", store)  # type: ignore[attr-defined]  # documented
        attempt = agree_on_attempt(shared, rank, world, timeout)
    own = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=timeout)


def agree_on_attempt(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """A name of this start of all ranks, the same on all of them, which no earlier start had.

    torchrun's agents may keep one store for all starts, and count restarts each for itself: one
    whose ranks were stopped because those of another host had failed has not restarted them. So
    rank 0 chooses, and answers every rank by a token that is new with its process; what it found of
    a process that is gone, it answers in vain. Agents start no rank before all earlier ones have
    ended.

    Args:
        store: of all starts.
        rank: of this process.
        world: how many ranks there are.
        timeout: for the others to start.

    Raises:
        PipelineError: on rank 0, of ranks that did not start in time.
        DistStoreError: on the others, where rank 0 did not.
    """
    name = uuid.uuid4().hex
    if rank:
        store.set(f"token of {rank}", name)
        name = store.get(name).decode()
        store.set(f"{name} {rank}", "")
        return name
    answered: dict[int, bytes] = {}
    missing = set(range(1, world))
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        missing = {other for other in missing if not store.check([f"{name} {other}"])}
        if not missing:
            return name
        if time.monotonic() > deadline:
            said = ", ".join(map(str, sorted(missing)))
            seconds = timeout.total_seconds()
            raise PipelineError(f"ranks {said} of {world} did not start within {seconds:g} s")
        for other in missing:
            if not store.check([f"token of {other}"]):
                continue
            token = store.get(f"token of {other}")
            if answered.get(other) != token:
                store.set(token.decode(), name)
                answered[other] = token
        time.sleep(_LOOK_EVERY)
