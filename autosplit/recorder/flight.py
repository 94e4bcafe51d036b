"""The flight recorder of a trainer: it records each step, agrees with all ranks on alarms, and
writes bundles.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autosplit.device import settle
from autosplit.errors import BatchError
from autosplit.pipeline.engine.executor import BoundAction, Executor
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.engine.timing import SpanRecorder
from autosplit.pipeline.schedule.schedule import BACKWARDS, Action, ActionKind
from autosplit.pipeline.simulation.simulate import Span
from autosplit.ranks.first_error import Guard
from autosplit.ranks.groups import Groups
from autosplit.recorder.bundle import write_part
from autosplit.recorder.options import Recorder
from autosplit.recorder.programs import programs_of
from autosplit.recorder.tape import StepTape
from autosplit.stage import Stage
from autosplit.torch_internals.dtensor import is_dtensor, local_tensor
from autosplit.torch_internals.state import StateReader


class EqualCopies(NamedTuple):
    """Copies of parameters that must be equal on several ranks, bit for bit.

    Attributes:
        owners: name of the ranks that hold copies, such as "replicas"; for reports.
        sets: sets of ranks; all ranks of a set must hold equal copies.
        places: (stage, name) of each of the parameters on this rank.
    """

    owners: str
    sets: Sequence[Sequence[int]]
    places: Sequence[tuple[int, str]]


class FlightRecorder:
    """Records the steps of a trainer on this rank. Collective: all ranks construct it together.

    Args:
        options: the user's options.
        modules: this rank's modules by stage.
        shared: groups of (stage, parameter name); each group is one parameter of the model.
        groups: the trainer's process groups.
        guard: the trainer's guard.
        seeds: the seeds of stages that draw random numbers.
        device: the device of the stages.
        scales: whether losses are scaled, so that gradients may be infinite.

    Attributes:
        checks_of_ranks: returns the numbers of ``end_actions`` of all ranks; set by the caller.
        release: restores the handler of the signal.
    """

    def __init__(
        self,
        options: Recorder,
        modules: Mapping[int, nn.Module],
        shared: Sequence[Sequence[tuple[int, str]]],
        groups: Groups,
        guard: Guard,
        seeds: StageSeeds,
        device: torch.device,
        *,
        scales: bool,
    ) -> None:
        self._options, self._modules, self._shared = options, modules, shared
        self._groups, self._guard, self._seeds = groups, guard, seeds
        self._device, self._scales = device, scales
        if options.tensors and groups.layout.exchanges:
            warnings.warn(
                "ranks along 'tp', 'ep' or 'cp' exchange tensors inside of F, I and W, so that a "
                "replay cannot run them again. It names the alarm, and the first action whose "
                "results are not finite. To find wrong bits, call trainer.verify(batch). To write "
                "digests only, and get no warning, pass Recorder(tensors=False)",
                stacklevel=2,
            )
        (started,) = groups.everybody.broadcast([int(time.time())], 0)
        self._run = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
        self._step, self._ring = 0, deque[StepTape](maxlen=options.steps)
        self._readers: dict[nn.Module, StateReader] = {}
        self._written: set[str] = set()
        self._tape: StepTape | None = None
        self._copies: Sequence[EqualCopies] = ()
        self._alarms: dict[str, str] = {}  # of this rank in the step, with a text for each
        self.checks_of_ranks: Callable[[], Sequence[Sequence[float]]] = lambda: ()
        self._signalled = False
        self.release: Callable[[], object] = lambda: None
        if "signal" in options.alarms and threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGUSR1, self._note_signal)
            self.release = partial(signal.signal, signal.SIGUSR1, previous)

    def _note_signal(self, *_: object) -> None:
        self._signalled = True

    # --- a step -----------------------------------------------------------------------------------

    def watch(self, after_bubbles: Collection[Action], bound: BoundAction) -> BoundAction:
        """Return the action with calls that also record its input and its result.

        Args:
            after_bubbles: the actions before which the rank has time for digests.
            bound: the action.
        """
        action, fetch, deliver = bound.action, bound.fetch, bound.deliver
        records_held = self._options.digests == "all"
        if fetch is None:
            return self._watch_held(bound) if records_held else bound

        def noted_fetch() -> list[Any]:
            """Record state and held tensors before the input arrives, then fetch the input."""
            tape = self._tape
            if tape is None:  # no step is recorded while gradients are verified
                return fetch()
            tape.note_state()
            if action in after_bubbles:
                tape.compute_digests()
            if records_held:
                tape.note_held(action)
            values = fetch()
            tape.note_arguments(action, values)
            return values

        def noted_deliver(values: list[Any]) -> None:
            if deliver is not None:
                deliver(values)
            if self._tape is not None:
                self._tape.note_results(action, values)
                if records_held:
                    self._tape.note_held(action)

        return bound._replace(fetch=noted_fetch, deliver=noted_deliver)

    def _watch_held(self, bound: BoundAction) -> BoundAction:
        """Return Ws, one or several in one call, that also record the tensors that they take."""

        def note_then_compute() -> Any:
            if self._tape is not None:
                for action in bound.recorded:
                    self._tape.note_held(action)
            return bound.compute()

        return bound._replace(compute=note_then_compute)

    def start_step(
        self,
        executor: Executor,
        stages: Mapping[int, TrainableStage],
        batch: Iterable[Tensor | None],
        times: SpanRecorder,
        *,
        reduces: bool,
    ) -> None:
        """Begin to record a step. Call it before the step's first action; for the arguments, see
        ``StepTape``. ``times`` records the actions' times.
        """
        self._step += 1
        self._executor, self._stages, self._times = executor, stages, times
        state = {index: self._state_of(index, stage) for index, stage in stages.items()}
        self._tape = StepTape(
            self._step,
            stages,
            state,
            batch,
            self._options.kept_bytes,
            self._seeds,
            self._device,
            reduces=reduces,
            scales=self._scales,
        )

    def _state_of(self, index: int, stage: TrainableStage) -> dict[str, Tensor]:
        """Parameters and buffers by the names that the stage's graphs use. Buffers that F writes
        are copied.
        """
        module = stage.module if isinstance(stage, Stage) else self._modules[index]
        if module not in self._readers:
            self._readers[module] = StateReader(module)
        state = {**self._readers[module].read()}
        captured = stage.captured if isinstance(stage, Stage) else ()
        written = {name for functions in captured for name in functions.updated_state}
        return state | {name: state[name].clone() for name in written}

    def end_actions(self, spans: Sequence[Span], *, are_finite: bool) -> list[float]:
        """End the tape of the step; see ``StepTape.end``.

        Returns:
            The numbers that this rank sends to all ranks: its alarms and checksums.
            ``checks_of_ranks`` then returns the numbers of all ranks.
        """
        tape: Any = self._tape
        self._copies = self._copies_in(tape.state)
        # The caller's backward of the batch may add to the gradients before the step is written.
        compares = bool(self._copies or self._executor.batch_gradients)
        tape.end([*spans], are_finite=are_finite, compares=compares)
        self._ring.append(tape)
        self._alarms = {
            alarm: faults[0][1]
            for alarm, faults in tape.faults.items()
            if faults and alarm in self._options.alarms
        }
        if self._signalled:
            self._signalled = False
            self._alarms["signal"] = "SIGUSR1"
        return [len(self._alarms), *(tape.checksum(copies.places) for copies in self._copies)]

    @contextlib.contextmanager
    def recording(self, metrics: Callable[[], dict[str, float]]) -> Iterator[None]:
        """Context that records the step inside it, and writes the step after an alarm of any rank.

        Args:
            metrics: a function that returns the metrics of the step.
        """
        self._tape = None
        try:
            yield
            if self._tape is not None:
                self._tape.metrics = metrics()
                self._raise_alarms(self._tape)
        except BatchError:
            raise
        except Exception as error:
            if self._tape is not None:  # ranks that are between steps have nothing to write
                self._write_after(error, self._tape)
            raise
        finally:
            if self._tape is not None:
                self._tape.release()
            self._tape = None

    def _write_after(self, error: Exception, tape: StepTape) -> None:
        """Write a step that raised; the other ranks raise in the same step, and write it, too."""
        with self._reporting("write the step"):
            settle(self._device)
            if tape not in self._ring:
                self._ring.append(tape)
                tape.end(self._times.spans())
            name = "nonfinite" if tape.faults["nonfinite"] else "error"
            if {name, "error"} & {*self._options.alarms}:
                self._write(tape, name, f"{type(error).__name__}: {_cause(error)}")

    def _raise_alarms(self, tape: StepTape) -> None:
        """Write the step, once, if any rank has an alarm. Collective."""
        everybody = self._groups.everybody
        if self._options.log is not None:
            path = Path(self._options.log) / f"rank-{everybody.rank}.jsonl"
            with self._reporting(f"write {path}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps(tape.record()) + "\n")
        table = self.checks_of_ranks()
        raised = dict[str, str]()
        if any(row[0] for row in table) or self._judge_metrics(tape.metrics):
            with self._guard.during("the alarms of a step"):
                for alarms in everybody.gather(self._alarms):
                    raised = alarms | raised
        if "replicas" in self._options.alarms and (text := self._difference(table)):
            raised["replicas"] = text
        if new := [name for name in raised if name == "signal" or name not in self._written]:
            self._written |= raised.keys()
            self._write(tape, new[0], raised[new[0]])

    # --- alarms -----------------------------------------------------------------------------------

    def _judge_metrics(self, metrics: Mapping[str, float]) -> bool:
        """Whether a function of the user raises an alarm on any rank; collective."""
        if "metrics" not in self._options.names:
            return False
        for alarm in filter(callable, self._options.alarms):
            name = getattr(alarm, "__name__", repr(alarm))
            with self._reporting(f"call {name}(metrics)"):
                if alarm(metrics):
                    figures = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
                    self._alarms["metrics"] = f"{name}(metrics) is true for {figures}"
        count = torch.tensor([len(self._alarms)], device="cpu")
        if self._groups.everybody.ranks > 1:
            with self._guard.during("the alarms of a step"):
                count = self._groups.everybody.start_sum(count)()
        return bool(count.item())

    def _copies_in(self, state: Mapping[int, Mapping[str, Tensor]]) -> list[EqualCopies]:
        """The parameters of which several ranks must have the same bits; empty if there are
        none.
        """
        layout = self._groups.layout
        along_tp = layout.sets("tensor")
        if not self._shared and max(map(len, (*layout.copies, *along_tp))) < 2:
            return []
        tensors = {
            id(tensor): (tensor, (stage, name))
            for stage, named in state.items()
            for name, tensor in named.items()
            if isinstance(tensor, nn.Parameter)
        }
        places = [place for _, place in tensors.values()]
        plain = [place for tensor, place in tensors.values() if not is_dtensor(tensor)]
        rows = [
            EqualCopies("replicas", layout.copies, places),
            EqualCopies("ranks along 'tp'", along_tp, plain),
        ]
        for holders in self._shared:
            here = [(stage, name) for stage, name in holders if stage in self._modules]
            numbers = [id(self._modules[stage].get_parameter(name)) for stage, name in here[:1]]
            places = [tensors[number][1] for number in numbers if number in tensors]
            rows.append(EqualCopies(f"the holders {[*holders]}", layout.pipelines, places))
        return rows

    def _difference(self, table: Sequence[Sequence[float]]) -> str:
        """Text that names ranks whose copies of a tensor have different bits; empty if all copies
        are equal.
        """
        for column, (owners, sets, _) in enumerate(self._copies, 1):
            for ranks in sets:
                present = {rank: table[rank][column] for rank in ranks if table[rank][column]}
                if len({*present.values()}) > 1:
                    return (
                        f"parameters or gradients of {owners} differ between the ranks {[*present]}"
                    )
        return ""

    # --- bundles ----------------------------------------------------------------------------------

    def _write(self, tape: StepTape, alarm: str, text: str) -> None:
        """Write this rank's part of the step; an error of the disk is a warning."""
        everybody = self._groups.everybody
        path = Path(self._options.folder) / f"{self._run}-step-{self._step}"
        wiring = self._executor.messages.dataflow.wiring
        facts: dict[str, Any] = {
            "rank": everybody.rank,
            "ranks": everybody.ranks,
            "pipeline": self._groups.layout.index,
            "copies": next(c for c in self._groups.layout.copies if everybody.rank in c),
            "alarm": alarm,
            "text": text,
            "torch": torch.__version__,
            "device": self._device.type,
            "threads": torch.get_num_threads(),
            "placement": self._executor.schedule.placement,
            "wiring": None if wiring is None else asdict(wiring),
            "steps": [tape.record() for tape in self._ring],
            "stages": {},
        }
        sources: dict[str, str] = {}
        tensors: dict[str, Any] = {}
        with self._reporting(f"write {path}"):
            if self._options.tensors:
                kept = {str(action): values for action, values in tape.kept.items()}
                tensors = {"state": tape.state, "kept": kept, "constants": {}}
                for at, stage in self._stages.items():
                    facts["stages"][at], programs, tensors["constants"][at] = programs_of(
                        stage,
                        tape.state[at],
                        tape.functions_of(at),
                        tape.gradients_come(at),
                    )
                    sources |= {f"stage-{at}/{name}.py": code for name, code in programs.items()}
            write_part(path, everybody.rank, everybody.ranks, facts, sources, _on_host(tensors))
            headline = text.partition("\n")[0]
            warnings.warn(
                f"the flight recorder wrote step {self._step} to {path}, because of {alarm}: "
                f"{headline}. Run: autosplit replay {path}",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _reporting(self, task: str) -> Iterator[None]:
        """Context that turns errors, such as those of a full disk or of a user's function, into
        warnings: the recorder ends no step.
        """
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            warnings.warn(f"the flight recorder cannot {task}: {text}", stacklevel=2)


def backwards_after_bubbles(row: Sequence[Action], last: int) -> set[Action]:
    """The backwards before which a rank waits longer than a message takes: its first one, and those
    after its last forward. Before others, digests would delay the stages that wait for this rank.

    Args:
        row: the rank's actions.
        last: the last stage, whose backwards wait for no other stage.
    """
    first = next((action for action in row if action.kind in BACKWARDS), row[-1])
    cool_down = itertools.takewhile(lambda a: a.kind is not ActionKind.FORWARD, reversed(row))
    return {a for a in (first, *cool_down) if a.kind in BACKWARDS and a.stage < last}


def _on_host(value: Any) -> Any:
    """The value, with its tensors, or this rank's parts of them, in the host's memory."""
    if isinstance(value, Tensor):
        return local_tensor(value).detach().cpu()
    if isinstance(value, Mapping):
        return {name: _on_host(item) for name, item in value.items()}
    return [*map(_on_host, value)] if isinstance(value, list) else value


def _cause(error: Exception) -> str:
    """The first line of an error's text, and the indented lines after it, which give the cause."""
    first, *lines = str(error).splitlines() or [""]
    indented = itertools.takewhile(lambda line: line.startswith("  "), lines)
    return "\n".join([first.rstrip("."), *indented])
