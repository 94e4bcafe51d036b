"""The first error of a run, made known to every rank.

failing rank   posts its fault in the shared store, then closes its connections
its peers      see a closed connection, read the fault, and raise it as the first cause
               close their own connections, which ends the waits of further ranks
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from autosplit.errors import AutosplitError, BatchError, PipelineError
from autosplit.ranks.fault_store import Fault, FaultStore

if TYPE_CHECKING:
    from autosplit.ranks.watch import PeerWatch

OUTSIDE_CALLS = "the code around the trainer"


class RankActivity:
    """The present activity of a rank: written by the training thread, read by the watch's thread.

    Attributes:
        phase: the trainer's call, or a part of it, as text.
        action: the action of the schedule; None outside of a step.
        waiting: whether the rank waits for other ranks.
        turn: the number of changes of phase or action so far.
        announce: a function that writes the phase for the other ranks at once; it has no effect
            without a watch.
    """

    def __init__(self) -> None:
        self.announce: Callable[[], None] = lambda: None
        self.phase = OUTSIDE_CALLS
        self.action: object = None
        self.waiting = False
        self.turn = 0

    def __str__(self) -> str:
        action = self.action
        return self.phase if action is None else str(action)

    def during(self, phase: str, *, announced: bool = False) -> Phase:
        """Context that sets the phase. After an error that ends the run, the phase stays set, for
        the report.

        Args:
            phase: the phase in words.
            announced: whether other ranks learn of the phase's begin and end at once, at the price
                of two messages, instead of at the next heartbeat.
        """
        return Phase(self, phase, announced)

    def enter(self, phase: str, *, announced: bool = False) -> None:
        """Set the phase. Other ranks learn of it at the next heartbeat, or at once if
        ``announced``.
        """
        self.phase = phase
        self.turn += 1
        if announced:
            self.announce()

    def set_action(self, action: object, *, waiting: bool) -> None:
        """Set the action, or None, and whether the rank waits for other ranks."""
        self.action, self.waiting = action, waiting
        self.turn += 1

    @contextlib.contextmanager
    def during_wait(self, action: object = None) -> Iterator[None]:
        """Context that records that the rank waits: for other ranks or, with an action, only for
        its own host.
        """
        previous = self.action, self.waiting
        self.set_action(action or self.action, waiting=action is None)
        try:
            yield
        finally:
            self.set_action(previous[0], waiting=previous[1])


class Phase:
    """The context of ``during``. It is a class, because every step enters several.

    Args:
        activity: the present activity of this rank.
        phase: the phase in words.
        announced: whether other ranks learn of it at once.
        guard: ends the run after an error inside; None: errors are only passed on.
    """

    def __init__(
        self, activity: RankActivity, phase: str, announced: bool, guard: Guard | None = None
    ) -> None:
        self._activity, self._phase, self._announced = activity, phase, announced
        self._guard, self._previous = guard, activity.phase

    def __enter__(self) -> None:
        self._activity.enter(self._phase, announced=self._announced)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, BatchError):
            self._activity.enter(self._previous, announced=self._announced)
        elif self._guard is not None:
            self._guard.end_after(error)


# Messages of Gloo about a closed connection, and of NCCL about one that the watch has aborted.
_LOST = (
    "gloo/transport",
    "Connection closed by peer",
    "caused pair closure",
    "Socket closed",
    "communicator was aborted",
)
# A check costs a round trip to the store, so a wait for the device sleeps in between.
_CHECK_EVERY = 0.05
_NAP = 0.0002


class LostPeerError(PipelineError):
    """Communication failed: a peer died, closed its connection, or did not answer in time.

    Attributes:
        waited: text on the wait that timed out; empty for another failure.
    """

    def __init__(self, message: str, waited: str = "") -> None:
        super().__init__(message)
        self.waited = waited


class ActionError(PipelineError):
    """An action of the schedule raised an error, which is the ``__cause__`` of this error."""

    def __init__(self, action: object) -> None:
        super().__init__(f"{action} failed")
        self.action = action


class RankError(PipelineError):
    """A fault has ended the run on all ranks; ``fault.rank`` is the rank that failed."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


class Guard:
    """Ends the run on all ranks if this rank raises an error, and raises the first error of the run
    as the cause.

    Args:
        rank: this rank.
        faults: the shared store of faults; None in a run of one process.
        close: closes this rank's connections; called once, after the fault is posted.
        activity: the present activity of this rank.
        watch: reports ranks that died, left or hang; None in a run of one process.
    """

    def __init__(
        self,
        rank: int,
        faults: FaultStore | None,
        close: Callable[[], None],
        activity: RankActivity,
        watch: PeerWatch | None,
    ) -> None:
        self._rank = rank
        self._faults = faults
        self._close = close
        self._activity = activity
        self._watch = watch
        self._ended: Fault | None = None
        self._closed = False

    def during(self, phase: str, *, announced: bool = False) -> Phase:
        """Context that guards a phase of the work: an error inside ends the run on all ranks.

        Args:
            phase: the phase in words, for errors.
            announced: as for ``RankActivity.during``.

        Raises:
            RankError: a rank failed, or the run had ended before.
            PipelineError: the trainer is closed.
            BatchError: a BatchError was raised inside; it does not end the run.
            AutosplitError: this rank raised another typed error inside.
        """
        if self._ended is not None:
            raise RankError(
                f"this trainer has ended and cannot go on; build a new one. It ended because "
                f"{self._ended.headline}",
                self._ended,
            )
        if self._closed:
            raise PipelineError("this trainer was closed: build a new one")
        return Phase(self._activity, phase, announced, self)

    def end_after(self, error: BaseException) -> None:
        """End the run after an error inside a phase, and raise the error that all ranks report.

        Return after a RankError of an inner guard, which has ended the run.
        """
        if isinstance(error, RankError):
            if self._ended is None:
                self._end_failed(error)
            return
        lost = error if isinstance(error, LostPeerError) else _lost_inside(error)
        if lost is not None:
            self._end_lost(lost)
        self._end_failed(error)

    def close(self) -> None:
        """Close the guard: entering another phase raises."""
        self._closed = True

    def left(self, error: BaseException) -> None:
        """End the run, because the user's code between two calls of the trainer raised an error."""
        if self._ended is None:
            self._end(Fault.of(self._rank, OUTSIDE_CALLS, error, error.__traceback__))

    def check(self) -> None:
        """Raise LostPeerError if a rank has posted a fault or is gone. Loops that wait on the host
        call it.
        """
        if self._faults is not None and self._faults.first() is not None:
            raise LostPeerError("stopped because another rank failed")
        missing = None if self._watch is None else self._watch.missing
        if missing is not None:
            raise LostPeerError(missing.headline)

    def wait(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait on the host until ``done()``, and check for faults of other ranks meanwhile.

        It serves devices whose communication does not end with an error when a peer fails.

        Args:
            done: a function that returns whether the wait is over.
            timeout: seconds.

        Raises:
            LostPeerError: another rank failed, or ``timeout`` seconds passed.
        """
        started = checked = time.monotonic()
        with self._activity.during_wait():
            while not done():
                now = time.monotonic()
                if now - checked > _CHECK_EVERY:
                    self.check()
                    checked = now
                if now - started > timeout:
                    waited = f"waited {timeout:.3g} s for its device"
                    raise LostPeerError(
                        f"{waited}; another rank may be stuck: look at its log, or raise timeout=",
                        waited,
                    )
                time.sleep(_NAP)

    def _end_lost(self, error: LostPeerError) -> NoReturn:
        cause = None
        if self._watch is not None:
            cause = self._watch.explain(error)
        elif self._faults is not None:  # a rank posts before it closes a connection
            cause = self._faults.first()
        fault = self._end(cause or Fault(self._rank, self._activity.phase, str(error), lost=True))
        # The closed connection is a consequence; the message names the cause. A rank that died has
        # not reported its activity, but this rank knows which message it waits for.
        seen = f"\nRank {self._rank} {error}" if fault.ended else ""
        raise RankError(f"{fault.full_text}{seen}", fault) from None

    def _end_failed(self, error: BaseException) -> NoReturn:
        cause, trace, activity = error, error.__traceback__, self._activity.phase
        if isinstance(error, ActionError) and error.__cause__ is not None:
            activity, cause = str(error.action), error.__cause__
            trace = cause.__traceback__ and cause.__traceback__.tb_next  # after the executor's own
        fault = Fault.of(self._rank, activity, cause, trace)
        self._end(fault)
        if not isinstance(cause, Exception) or (
            cause is error and isinstance(cause, AutosplitError)
        ):
            raise cause
        raise RankError(fault.headline, fault) from cause

    def _end(self, fault: Fault) -> Fault:
        """End the run; return the fault that all ranks report."""
        self._ended = fault if self._faults is None else self._faults.post(fault)
        self._close()
        return self._ended


def _lost_inside(error: BaseException) -> LostPeerError | None:
    """The LostPeerError for a connection that was lost in a collective of the user's module or
    optimizer; None for another error.
    """
    action = f" in {error.action}" if isinstance(error, ActionError) else ""
    cause = error.__cause__ if isinstance(error, ActionError) else error
    if not isinstance(cause, RuntimeError) or not any(message in str(cause) for message in _LOST):
        return None
    reason = str(cause).partition("\n")[0]
    return LostPeerError(
        f"lost a peer in a collective of the module or the optimizer{action}: {reason}. If an "
        "earlier trainer whose ranks share tensors has failed, restart the processes: torch "
        "treats an equal mesh as the old one"
    )
