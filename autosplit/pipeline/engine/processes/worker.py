"""What happens in a process that ``launch`` starts, and the process group of any rank.

Ranks that torchrun starts, and starts again, find those of the same start.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from autosplit.errors import PipelineError
from autosplit.pipeline.engine.faults.first_error import KeyValueStore, describe_error
from autosplit.pipeline.engine.faults.rank_process import Process
from autosplit.pipeline.engine.faults.store_register import RETURNED
from autosplit.pipeline.engine.messages.default_group import register_of_world

from .loopback import on_loopback
from .outcome import Failure, Success

_LOOK_EVERY = 0.01


def agree_on_attempt(store: KeyValueStore, rank: int, world: int, timeout: timedelta) -> str:
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


@dataclass(frozen=True)
class Job:
    """A launched function with its arguments, the same for all ranks.

    Attributes:
        call: the pickled function and arguments.
        nprocs: number of ranks.
        port: where the store is served on 127.0.0.1.
        timeout: seconds for a wait in the default process group.
        threads: torch's threads, or None.
    """

    call: bytes
    nprocs: int
    port: int
    timeout: float
    threads: int | None


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
    local, here = (int(os.environ.get(f"LOCAL_{name}", 0)) for name in ("RANK", "WORLD_SIZE"))
    backend = "gloo"
    if dist.is_nccl_available() and torch.cuda.device_count() >= max(here, local + 1):
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    alone = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
    with on_loopback() if alone else contextlib.nullcontext():
        _initialise(backend, timedelta(seconds=timeout))
        register = register_of_world()
        rank = dist.get_rank()
        register.enter(rank, Process.of(os.getpid()))
        register.put("words", rank, "")  # an earlier group may have ended
        try:
            yield
        except BaseException as error:
            register.put("words", rank, f"raised {describe_error(error)}")
            raise
        else:
            register.put("words", rank, RETURNED)
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


def work(job: Job, rank: int, pipe: Connection) -> None:
    """Run the job as ``rank`` and report a Success or Failure, pickled, through ``pipe``."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches the whole process group; the parent ends its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(_environment(job, rank))
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    try:
        fn, args = pickle.loads(job.call)
        with process_group(job.timeout):
            result = fn(*args)
        message = pickle.dumps(Success(result))
    except BaseException as error:
        message = pickle.dumps(Failure.of_error(rank, error))
    pipe.send_bytes(message)


def _environment(job: Job, rank: int) -> dict[str, str]:
    """What torchrun would set; the last two make ranks use a store that is there already."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(job.nprocs),
        "LOCAL_WORLD_SIZE": str(job.nprocs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _end_with_parent() -> None:
    """End this process when its parent is gone, however that came about."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
