"""A rank's connection to the referee, and its threads: one a communicator, and one that hears."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import Settings
from .rules import group_of

_ROOT = Path(__file__).parents[2]
_LOOK_EVERY = 0.05  # seconds, while waiting, at what other threads do
_KEY = "strict referee"
_NAME = "strict"  # prefix of the names of the threads here


class StrictError(RuntimeError):
    """Communication that does not come to its end, under the rules of the strict group."""


class Pending:
    """One operation of this rank.

    Args:
        run: moves its data, once it may; returns when that is done.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.number = -1
        self.error: Exception | None = None
        self._over = threading.Event()
        self._calls: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def end(self, error: Exception | None = None) -> None:
        """It is over."""
        with self._lock:
            if self.over:
                return
            self.error = error
            self._over.set()
        for call in self._calls:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Call something when it is over."""
        with self._lock:
            if not self.over:
                self._calls.append(call)
                return
        call()

    def await_(self, seconds: float) -> bool:
        """Wait for a while; whether it is over."""
        return self._over.wait(seconds)


class Referee:
    """The process, started by one rank for all.

    Attributes:
        address: where it listens.
    """

    def __init__(self, world: int, settings: Settings) -> None:
        # It has no use for what tests import where these are set.
        kept = {name: item for name, item in os.environ.items() if not name.startswith("AUTOSPLIT")}
        command = [sys.executable, "-S", "-m", "tests.strict_group.referee", str(world)]
        self._process = subprocess.Popen(
            [*command, str(settings)], stdout=subprocess.PIPE, cwd=_ROOT, env=kept
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def end(self) -> None:
        """Wait until the last rank has let it go."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        threading.Thread(target=self._process.wait, daemon=True).start()


class Link:
    """The connection of one rank to the referee.

    Args:
        store: of the default process group.
        rank: of this process.
        world: how many ranks there are.
        settings: how strict the referee is, where this rank starts it.
    """

    def __init__(self, store: Any, rank: int, world: int, settings: Settings) -> None:
        self.rank = rank
        self._referee = Referee(world, settings) if rank == 0 else None
        if self._referee is not None:
            store.set(_KEY, str(self._referee.port))
        self._socket = socket.create_connection(("127.0.0.1", int(store.get(_KEY))))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[str, Pending]] = {}
        self._makings: dict[str, Pending] = {}
        self._workers: dict[str, queue.SimpleQueue[Pending | None]] = {}
        self._states: dict[int, queue.SimpleQueue[str]] = {}
        self._waiting: set[int] = set()
        self._users: set[int] = set()
        self._free = True
        self._broken: Exception | None = None
        self._closed = False
        self._tell("hello", rank)
        threading.Thread(target=self._hear, name=f"{_NAME}-link", daemon=True).start()

    # --- what groups ask for ------------------------------------------------------------------

    def make(self, communicator: str, members: Sequence[int], timeout: float) -> None:
        """Wait until the hosts of all members make a communicator.

        Raises:
            StrictError: one of them never will.
        """
        making = self._makings[communicator] = Pending(_nothing)
        self._users.add(threading.get_ident())
        self._check()
        self._tell("make", threading.get_ident(), communicator, [*members])
        self._await(making, f"making {communicator!r}", timeout)

    def enqueue(
        self, communicator: str, parts: Sequence[tuple[Pending, str, Sequence[int], object]]
    ) -> None:
        """One entry more in this rank's queue of a communicator.

        Args:
            communicator: its name.
            parts: operations, each with its kind, peers and what these are to agree on.
        """
        self._users.add(threading.get_ident())
        self._check()
        inputs = []
        with self._sending:
            for pending, kind, peers, size in parts:
                pending.number = next(self._numbers)
                self._pending[pending.number] = communicator, pending
                inputs.append([pending.number, kind, [*peers], size])
            self._send("enqueue", communicator, inputs)

    def wait(self, pending: Pending, what: str, timeout: float) -> None:
        """Wait for an operation.

        Raises:
            StrictError: it never ends, or came to nothing.
        """
        if not pending.over:
            self._check()
            self._tell("wait", threading.get_ident(), pending.number)
            self._await(pending, what, timeout)
        elif pending.error is not None:
            raise StrictError(str(pending.error)) from pending.error

    def abort(self, group: str, why: str) -> None:
        """Take no more part in a group: what waits for this rank there ends in errors."""
        with contextlib.suppress(StrictError):  # the referee is gone
            if not self._closed:
                self._tell("abort", group, why)

    def close(self) -> None:
        """Take no more part in anything."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(StrictError, OSError):
            self._tell("gone")
            self._socket.shutdown(socket.SHUT_RDWR)
        for worker in self._workers.values():
            worker.put(None)
        self._socket.close()
        if self._referee is not None:
            self._referee.end()

    # --- waits --------------------------------------------------------------------------------

    def _await(self, pending: Pending, what: str, timeout: float) -> None:
        thread, started, looked = threading.get_ident(), time.monotonic(), 0
        self._waiting.add(thread)
        try:
            while True:
                looked = self._look(looked)
                if pending.await_(_LOOK_EVERY):
                    break
                if time.monotonic() - started > timeout:
                    message = f"{what} was not over after {timeout:g} s"
                    pending.end(StrictError(f"{message}:\n{self._state()}"))
                    if pending.number in self._pending:  # which nobody is to fill any more
                        self.abort(group_of(self._pending[pending.number][0]), message)
        finally:
            self._waiting.discard(thread)
        if pending.error is not None:
            if self._broken is None and not self._closed:
                self._tell("waited", thread)
            raise StrictError(str(pending.error)) from pending.error

    def _look(self, looked: int) -> int:
        """Tell the referee whether another thread of this process may do something. Where there are
        some, all of which wait, that is believed if it is seen twice.
        """
        remaining = [item for item in threading.enumerate() if self._matters(item)]
        if any(not _waits(other) for other in remaining):
            free, looked = True, 0
        else:
            free, looked = bool(remaining) and not looked, looked + 1
        if free != self._free and self._broken is None:
            self._free = free
            self._tell("free", free)
        return looked

    def _matters(self, thread: threading.Thread) -> bool:
        """Whether a thread is one that may use groups and is in no wait here."""
        if thread.ident in self._waiting or thread.name.startswith(_NAME):
            return False
        return thread.ident in self._users or not thread.daemon

    def _state(self) -> str:
        token = next(self._numbers)
        answer = self._states[token] = queue.SimpleQueue()
        try:
            self._tell("state", token)
            return answer.get(timeout=5.0)
        except (queue.Empty, StrictError):
            return "and the referee does not answer"

    # --- the connection -----------------------------------------------------------------------

    def _check(self) -> None:
        if self._broken is not None:
            raise StrictError(str(self._broken)) from self._broken
        if self._closed:
            raise StrictError("the process group is destroyed")

    def _tell(self, *message: object) -> None:
        with self._sending:
            self._send(*message)

    def _send(self, *message: object) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise StrictError(
                f"Connection closed by peer: the referee is gone ({error})"
            ) from error

    def _hear(self) -> None:
        try:
            with self._socket.makefile("rb") as file:
                for line in file:
                    subject, *rest = json.loads(line)
                    getattr(self, f"_on_{subject}")(*rest)
        except (OSError, ValueError):
            pass
        if not self._closed:
            self._break(StrictError("Connection closed by peer: the referee is gone"))

    def _on_made(self, communicator: str) -> None:
        self._makings[communicator].end()

    def _on_unmade(self, communicator: str, why: str) -> None:
        self._makings[communicator].end(_lost(why))

    def _on_go(self, number: int) -> None:
        communicator, pending = self._pending[number]
        if communicator not in self._workers:
            worker = self._workers[communicator] = queue.SimpleQueue()
            name = f"{_NAME}-{communicator}"
            threading.Thread(target=self._work, args=(worker,), name=name, daemon=True).start()
        self._workers[communicator].put(pending)

    def _work(self, worker: queue.SimpleQueue[Pending | None]) -> None:
        while (pending := worker.get()) is not None:
            error: Exception | None = None
            try:
                pending.run()
            except Exception as raised:
                error = raised
            pending.run = _nothing  # nor keep what it ran over
            self._pending.pop(pending.number, None)
            if not self._closed:
                try:
                    self._tell("over", pending.number)
                except StrictError as lost:
                    error = error or lost
            pending.end(error)

    def _on_failed(self, number: int, why: str) -> None:
        _, pending = self._pending.pop(number)
        pending.end(_lost(why))

    def _on_state(self, token: int, text: str) -> None:
        self._states.pop(token).put(text)

    def _on_stuck(self, report: str) -> None:
        self._break(StrictError(report))

    def _break(self, error: Exception) -> None:
        self._broken = self._broken or error
        for _, pending in [*self._pending.values()]:
            pending.end(error)
        for making in [*self._makings.values()]:
            making.end(error)


def _nothing() -> None:
    """Moves no data."""


def _lost(why: str) -> StrictError:
    """In the words in which others say so, too."""
    return StrictError(why if "meets" in why else f"Connection closed by peer: {why}")


def _waits(thread: threading.Thread) -> bool:
    """Whether a thread stands where others of its process have to bring it on."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return True
    code = frame.f_code
    idle = code.co_name == "_worker" and code.co_filename.endswith("thread.py")
    return idle or code.co_filename.endswith("threading.py")
