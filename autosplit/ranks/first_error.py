"""The first error of a run, made known to every rank.

A rank that fails posts what happened on a board that all ranks share, then closes its
connections. Its peers see only the closed connection; they look at the board and raise the first
cause. They close their own connections too, so the news reaches ranks that wait for others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from autosplit.errors import AutosplitError, BatchError, PipelineError
from autosplit.ranks.board import Board, Fault

if TYPE_CHECKING:
    from autosplit.ranks.watch import PeerWatch

AROUND = "the code around the trainer"


class RankActivity:
    """What a rank is doing: written by the thread that does it, read by the one that watches.

    Attributes:
        phase: in words.
        action: the action of the schedule, within a step.
        waiting: whether it waits for other ranks.
        turn: counts the changes of these.
        announce: tells other ranks the phase at once, if somebody watches.
    """

    def __init__(self) -> None:
        self.announce: Callable[[], None] = lambda: None
        self.phase = AROUND
        self.action: object = None
        self.waiting = False
        self.turn = 0

    def __str__(self) -> str:
        action = self.action
        return self.phase if action is None else str(action)

    @contextlib.contextmanager
    def __call__(self, phase: str, *, announced: bool = False) -> Iterator[None]:
        """Be in a phase. An error that ends a run leaves it as it is, to say where that was.

        Args:
            phase: in words.
            announced: whether other ranks learn at once of its begin and end, for the price of
                two messages. Of other phases they learn at the next heartbeat.
        """
        before = self.phase
        announce = self.announce if announced else lambda: None
        self.enter(phase)
        announce()
        try:
            yield
        except BatchError:
            self.enter(before)
            raise
        self.enter(before)
        announce()

    def enter(self, phase: str) -> None:
        """Be in another phase."""
        self.phase = phase
        self.turn += 1

    def be(self, action: object, *, waiting: bool) -> None:
        """Be in an action, or in none, and wait for what it needs, or do it."""
        self.action, self.waiting = action, waiting
        self.turn += 1

    @contextlib.contextmanager
    def waits(self, action: object = None) -> Iterator[None]:
        """Wait for other ranks; with an action, for something of it that none has a part in."""
        before = self.action, self.waiting
        self.be(action or self.action, waiting=action is None)
        try:
            yield
        finally:
            self.be(before[0], waiting=before[1])


# What Gloo says of a connection that has ended, and NCCL where the watch has cut it.
_LOST = (
    "gloo/transport",
    "Connection closed by peer",
    "caused pair closure",
    "Socket closed",
    "communicator was aborted",
)
# A look costs a round trip to the store, so a wait for the device naps in between.
_LOOK_WHILE_WAITING = 0.05
_NAP = 0.0002


class LostPeerError(PipelineError):
    """Communication failed: a peer died, closed its connection, or did not answer in time.

    Attributes:
        waited: how long for what, in words, where time was up; else empty.
    """

    def __init__(self, message: str, waited: str = "") -> None:
        super().__init__(message)
        self.waited = waited


class ActionError(PipelineError):
    """An action of the schedule raised; the error is the cause of this one."""

    def __init__(self, action: object) -> None:
        super().__init__(f"{action} failed")
        self.action = action


class RankError(PipelineError):
    """A run ended by a fault on this rank (``fault.rank``) or another one."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


class Guard:
    """Turns whatever ends a rank's work into the first cause, on this rank and its peers.

    Args:
        rank: this rank.
        board: the shared board; None in a run of one process.
        close: closes this rank's connections; called once, after the fault is posted.
        place: what this rank is doing.
        watch: knows of ranks that cannot say themselves what became of them.
    """

    def __init__(
        self,
        rank: int,
        board: Board | None,
        close: Callable[[], None],
        place: RankActivity | None = None,
        watch: PeerWatch | None = None,
    ) -> None:
        self._rank = rank
        self._board = board
        self._close = close
        self._place = RankActivity() if place is None else place
        self._watch = watch
        self._ended: Fault | None = None
        self._closed = False

    @contextlib.contextmanager
    def __call__(self, where: str, *, announced: bool = False) -> Iterator[None]:
        """Guard a phase of the work, described by ``where`` and announced as by ``RankActivity``.

        Raises:
            RankError: this rank failed, or another one did; or the run had ended before.
            PipelineError: the run was closed.
            BatchError: as it was raised inside, which ends nothing.
            AutosplitError: as it was raised inside, where it says all there is to say.
        """
        if self._ended is not None:
            raise RankError(
                f"this trainer has ended and cannot go on; build a new one. It ended because "
                f"{self._ended.headline}",
                self._ended,
            )
        if self._closed:
            raise PipelineError("this trainer was closed: build a new one")
        try:
            with self._place(where, announced=announced):
                yield
        except BatchError:
            raise
        except LostPeerError as error:
            self._end_lost(error)
        except RankError as error:
            if self._ended is None:  # else a guard inside has seen to it
                self._end_failed(error)
            raise
        except BaseException as error:
            lost = _lost_inside(error)
            if lost is not None:
                self._end_lost(lost)
            self._end_failed(error)

    def close(self) -> None:
        """Let nothing run any more."""
        self._closed = True

    def left(self, error: BaseException) -> None:
        """End the run because the caller's own code, between two calls, raised an error."""
        if self._ended is None:
            self._end(Fault.of(self._rank, AROUND, error, error.__traceback__))

    def check(self) -> None:
        """Raise LostPeerError if some rank has posted a fault; for loops that wait on the host."""
        if self._board is not None and self._board.first() is not None:
            raise LostPeerError("stopped because another rank failed")
        missing = None if self._watch is None else self._watch.missing
        if missing is not None:
            raise LostPeerError(missing.headline)

    def wait(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait on the host until ``done()``, with an eye on the board.

        For devices whose communication does not end with an error when a peer fails.

        Raises:
            LostPeerError: another rank failed, or ``timeout`` seconds passed.
        """
        started = looked = time.monotonic()
        with self._place.waits():
            while not done():
                now = time.monotonic()
                if now - looked > _LOOK_WHILE_WAITING:
                    self.check()
                    looked = now
                if now - started > timeout:
                    waited = f"waited {timeout:.3g} s for its device"
                    raise LostPeerError(f"{waited}: is another rank stuck?", waited)
                time.sleep(_NAP)

    def _end_lost(self, error: LostPeerError) -> NoReturn:
        cause = None
        if self._watch is not None:
            cause = self._watch.explain(error)
        elif self._board is not None:  # a rank posts before it closes a connection
            cause = self._board.first()
        fault = self._end(cause or Fault(self._rank, self._place.phase, str(error), lost=True))
        # The closed connection is a consequence: the cause stands in the message. Nobody could ask
        # a rank that died what it was at, but what it was to send is known here.
        seen = f"\nRank {self._rank} {error}" if fault.ended else ""
        raise RankError(f"{fault.report}{seen}", fault) from None

    def _end_failed(self, error: BaseException) -> NoReturn:
        cause, trace, where = error, error.__traceback__, self._place.phase
        if isinstance(error, ActionError) and error.__cause__ is not None:
            where, cause = str(error.action), error.__cause__
            trace = cause.__traceback__
        # The first frame is the guard's or the executor's own.
        fault = Fault.of(self._rank, where, cause, trace and trace.tb_next)
        self._end(fault)
        if not isinstance(cause, Exception) or (
            cause is error and isinstance(cause, AutosplitError)
        ):
            raise cause
        raise RankError(fault.headline, fault) from cause

    def _end(self, fault: Fault) -> Fault:
        """End the run; the fault that stands for all."""
        self._ended = fault if self._board is None else self._board.post(fault)
        self._close()
        return self._ended


def _lost_inside(error: BaseException) -> LostPeerError | None:
    """A connection that was lost in what a module or an optimizer does by itself, such as a
    collective of ranks that share its tensors.
    """
    action = f" in {error.action}" if isinstance(error, ActionError) else ""
    cause = error.__cause__ if isinstance(error, ActionError) else error
    if not isinstance(cause, RuntimeError) or not any(said in str(cause) for said in _LOST):
        return None
    reason = str(cause).partition("\n")[0]
    return LostPeerError(
        f"lost a rank of a collective of its own{action}: {reason}. If a trainer whose ranks share "
        "tensors has failed before, start the processes again: torch takes equal meshes for one"
    )
