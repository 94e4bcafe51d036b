"""The default process group: create it, read its size, and gather plain data over it.

Ranks of one machine listen on its loopback interface, which other hosts cannot reach. Ranks that
torchrun restarts find the ranks of the same restart.
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

from autosplit.errors import PipelineError, with_code
from autosplit.ranks.control import gather_in
from autosplit.ranks.fault_store import RETURNED, FaultStore, Process, describe_error

# A rank that loses a peer looks for the cause for so long.
_PATIENCE = 1.0
_CHECK_EVERY = 0.01
_LONGEST = 10**8  # seconds; torch's clocks overflow at little more


def gather(value: object) -> list[Any]:
    """Gather ``value`` from every process, by rank; collective over the default group.

    Raises:
        PipelineError: a process did not take part; the message names a process that has ended.
    """
    try:
        return gather_in(value, None)
    except RuntimeError as error:
        ranks = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        ending = await_ending(world_fault_store(), ranks, _PATIENCE) or "lost the other ranks"
        reason = str(error).partition(". ")[0].partition("\n")[0]
        raise PipelineError(
            f"{ending}, so rank {dist.get_rank()} cannot go on: {reason}"
        ) from error


def world_fault_store() -> FaultStore:
    """The fault store of the default process group."""
    world = dist.group.WORLD
    if world is None:
        raise PipelineError(
            "there is no default process group: call torch.distributed.init_process_group(), or "
            "use autosplit.process_group()"
        )
    return FaultStore(world.get_group_store())


def await_ending(faults: FaultStore, ranks: Iterable[int], seconds: float) -> str:
    """Wait until one of the ranks has ended. Return text on how it ended; empty if none ends in
    time.
    """
    candidates, deadline = list(ranks), time.monotonic() + seconds
    while True:
        for rank in candidates:
            if how := faults.ending(rank):
                return f"rank {rank} {how}"
        if time.monotonic() > deadline:
            return ""
        time.sleep(_CHECK_EVERY)


def process_count(ranks: int | None, stages: int) -> int:
    """The number of processes over which the stages are spread.

    Args:
        ranks: the number that the user passed; None for the size of the default process group.
        stages: the number of stages.

    Raises:
        PipelineError: there is no process group and one is needed, or the count does not fit.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if ranks is None and world is None and stages > 1:
        raise PipelineError(
            with_code(
                f"{stages} stages need a process group and there is none: run under "
                f"'torchrun --nproc-per-node {stages}' inside autosplit.process_group(), "
                "or through autosplit.launch. ranks=1 holds all stages in this process",
                wrong="trainer = PipelineTrainer(...)  # python train.py",
                right="with autosplit.process_group():\n"
                "    trainer = PipelineTrainer(...)  "
                f"# torchrun --nproc-per-node {stages} train.py",
            )
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
            "leave ranks= out to use all of them, or pass ranks=1 for one process"
        )
    return count


_ADDRESS = "127.0.0.1"
_NAMES = ("lo", "lo0")


def is_positive(value: object, maximum: float = math.inf) -> bool:
    """Whether ``value`` is a number (not a bool) above 0 and at most ``maximum``."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= maximum


def wait_limit(timeout: float) -> timedelta:
    """The timeout of a wait, as torch expects it.

    Args:
        timeout: seconds.

    Raises:
        PipelineError: ``timeout`` is not a positive number, or is too large for torch.
    """
    if not is_positive(timeout, _LONGEST):
        raise PipelineError(
            f"timeout must be a positive number of seconds, at most {_LONGEST:,}; got {timeout!r}"
        )
    return timedelta(seconds=timeout)


def serve_store(timeout: float) -> dist.TCPStore:  # type: ignore[name-defined]  # not in __all__
    """Serve a store to the processes of this machine, on ``store.port``.

    By default TCPStore listens on all interfaces, so it is passed a socket that is bound to the
    loopback interface.

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
    """Context in which new process groups listen on the loopback interface.

    By default Gloo uses the interface of the machine's name, and NCCL any interface. Environment
    variables that name an interface take precedence.
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
    """Context with the default process group, for a rank that torchrun has started; the group is
    destroyed at the end.

    ``launch`` runs its function inside this context already. CUDA tensors use NCCL if every rank of
    this machine has a GPU of its own, which becomes the current device. All other tensors use Gloo.
    If all ranks are on one machine, they listen on its loopback interface only, unless
    ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names another.

    Args:
        timeout: seconds after which a wait for another rank fails.

    Raises:
        PipelineError: the process has no rank, or ``timeout`` is not a positive number.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise PipelineError(
            "this process has no rank (RANK and WORLD_SIZE are not set): start it with torchrun, "
            "or use autosplit.launch"
        )
    limit = wait_limit(timeout)
    local, local_size = (int(os.environ.get(f"LOCAL_{name}", 0)) for name in ("RANK", "WORLD_SIZE"))
    backend = "gloo"
    if dist.is_nccl_available() and torch.cuda.device_count() >= max(local_size, local + 1):
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    is_one_machine = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
    with on_loopback() if is_one_machine else contextlib.nullcontext():
        _initialise(backend, limit)
        faults = world_fault_store()
        rank = dist.get_rank()
        faults.register(rank, Process.of(os.getpid()))
        faults.write_entry("ending", rank, "")  # clears the entry of an earlier group
        try:
            yield
        except BaseException as error:
            faults.write_entry("ending", rank, f"raised {describe_error(error)}")
            raise
        else:
            faults.write_entry("ending", rank, RETURNED)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _initialise(backend: str, timeout: timedelta) -> None:
    """Make the default process group.

    torchrun's agent keeps one store for all attempts. In it, restarted ranks would find the
    addresses of ranks that are gone, and wait for them. So each attempt has separate keys.
    """
    store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    attempt = "0"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        attempts = dist.PrefixStore("attempts", store)  # type: ignore[attr-defined]  # documented
        attempt = agree_on_attempt(attempts, rank, world, timeout)
    keys = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=keys, rank=rank, world_size=world, timeout=timeout)


def agree_on_attempt(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """Agree on a new name for this start of all ranks.

        rank r:  writes a new token     ->  rank 0:  answers the token with the name
        rank r:  confirms the name      ->  rank 0:  returns when all ranks have confirmed

    The agents' counts of restarts cannot be the name: each agent counts its own restarts, and not
    the stops that a failure on another host caused. A token belongs to one process, so an answer to
    a process that is gone has no effect. Agents start no rank before all earlier ones have ended.

    Args:
        store: the store of all starts.
        rank: this rank.
        world: the number of ranks.
        timeout: the time in which all ranks must start.

    Raises:
        PipelineError: on rank 0: other ranks did not start in time.
        DistStoreError: on the other ranks: rank 0 did not start in time.
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
            ranks = ", ".join(map(str, sorted(missing)))
            seconds = timeout.total_seconds()
            raise PipelineError(
                f"ranks {ranks} of {world} did not start within {seconds:g} s: see whether these "
                "processes were started and what they print, or pass a larger timeout="
            )
        for other in missing:
            if not store.check([f"token of {other}"]):
                continue
            token = store.get(f"token of {other}")
            if answered.get(other) != token:
                store.set(token.decode(), name)
                answered[other] = token
        time.sleep(_CHECK_EVERY)
