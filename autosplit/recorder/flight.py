"""The flight recorder of a trainer: it records each step, agrees with all ranks on alarms, and
writes bundles.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from autosplit.errors import BatchError
from autosplit.pipeline.engine.executor import BoundAction, Executor
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.engine.stage_seeds import StageSeeds
from autosplit.pipeline.simulation.simulate import Span
from autosplit.ranks.first_error import Guard
from autosplit.ranks.groups import Groups
from autosplit.recorder.bundle import write_part
from autosplit.recorder.options import ALARMS, Recorder
from autosplit.recorder.programs import programs_of
from autosplit.recorder.tape import Record, StepTape
from autosplit.torch_internals.dtensor import is_dtensor

_NAMES = (*ALARMS, "metrics")
_EVERY_TIME = ("signal",)


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
        (started,) = groups.everybody.broadcast([int(time.time())], 0)
        self._run = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
        self._step, self._ring = 0, deque[Record](maxlen=options.steps)
        self._written: set[str] = set()
        self._tape: StepTape | None = None
        self._signalled = False
        self.release: Callable[[], object] = lambda: None
        if "signal" in options.alarms and threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGUSR1, self._note_signal)
            self.release = partial(signal.signal, signal.SIGUSR1, previous)

    def _note_signal(self, *_: object) -> None:
        self._signalled = True

    # --- a step -----------------------------------------------------------------------------------

    def watch(self, bound: BoundAction) -> BoundAction:
        """Return the action with calls that also record its input and its result."""
        action, fetch, deliver = bound.action, bound.fetch, bound.deliver

        def noted_fetch() -> list[Any]:
            values = fetch()  # type: ignore[misc]
            self._tape.note_arguments(action, values)  # type: ignore[union-attr]
            return values

        def noted_deliver(values: list[Any]) -> None:
            if deliver is not None:
                deliver(values)
            self._tape.note_results(action, values)  # type: ignore[union-attr]

        return bound._replace(fetch=noted_fetch, deliver=noted_deliver)

    def start_step(
        self,
        executor: Executor,
        stages: Mapping[int, TrainableStage],
        batch: Iterable[Tensor | None],
        *,
        reduces: bool,
    ) -> None:
        """Begin to record a step, before its first action; see ``StepTape``."""
        self._step += 1
        self._executor, self._stages, self._spans = executor, stages, list[Span]()
        keep, seeds = self._options.kept_bytes, self._seeds
        self._tape = StepTape(
            self._step, stages, self._modules, batch, keep, seeds, reduces=reduces
        )

    def end_actions(self, spans: Sequence[Span]) -> None:
        """Record the times of the step's actions."""
        self._spans = [*spans]

    @contextlib.contextmanager
    def recording(self, metrics: Callable[[], dict[str, float]]) -> Iterator[None]:
        """Context that records the step inside it, and writes the step after an alarm of any rank.

        Args:
            metrics: a function that returns the metrics of the step.
        """
        self._tape = None
        try:
            yield
        except BatchError:
            raise
        except Exception as error:
            if self._tape is not None:  # ranks that are between steps have nothing to write
                record, name = self._end(), "error"
                if self._nonfinite(record):
                    name = "nonfinite"
                if {name, "error"} & {*self._options.alarms}:
                    self._write(name, f"{type(error).__name__}: {error}")
            raise
        record = self._end() | {"metrics": metrics()}
        self._ring[-1] = record
        self._log(record)
        alarms = self._alarms(record)
        with self._guard.during("the alarms of a step"):
            table = self._agree(alarms, record)
        if "replicas" in self._options.alarms and (text := self._difference(table)):
            alarms |= {"replicas": text}
            table[self._groups.everybody.rank][0] |= 1 << _NAMES.index("replicas")
        for at, name in enumerate(_NAMES):
            ranks = [rank for rank, row in enumerate(table) if row[0] & 1 << at]
            if ranks and (name in _EVERY_TIME or name not in self._written):
                self._written.add(name)
                self._write(name, alarms.get(name, f"raised on rank {ranks[0]}"))
                break  # the step is written once

    def _end(self) -> Record:
        """Make the record of the step, and keep it as the newest of the last steps."""
        record = self._tape.record(self._spans, self._device)  # type: ignore[union-attr]
        self._ring.append(record)
        return record

    def _log(self, record: Record) -> None:
        if self._options.log is None:
            return
        path = Path(self._options.log) / f"rank-{self._groups.everybody.rank}.jsonl"
        with self._reporting(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    # --- alarms -----------------------------------------------------------------------------------

    def _nonfinite(self, record: Record) -> str:
        tape = self._tape
        return "" if tape is None else tape.nonfinite(record, gradients=not self._scales)

    def _alarms(self, record: Record) -> dict[str, str]:
        """Maps the name of each alarm of this rank to its text."""
        alarms, wanted = dict[str, str](), self._options.alarms
        if "nonfinite" in wanted and (text := self._nonfinite(record)):
            alarms["nonfinite"] = f"{text} is not finite"
        if self._signalled:
            self._signalled = False
            alarms["signal"] = "SIGUSR1"
        for predicate in self._options.predicates:
            if predicate(record["metrics"]):
                name = getattr(predicate, "__name__", repr(predicate))
                alarms["metrics"] = f"{name}(metrics) is true for {record['metrics']}"
        return alarms

    def _agree(self, alarms: Mapping[str, str], record: Record) -> list[list[int]]:
        """Exchange alarms, and digests of tensors of which several ranks have copies; collective.

        Returns:
            For each rank: a bit for each of ``_NAMES``; then digests of all parameters and
            gradients, of those that are no DTensors, and of each shared parameter; 0 for a digest
            that the rank does not have.
        """
        everybody = self._groups.everybody
        flags = sum(1 << _NAMES.index(name) for name in alarms)
        table = torch.zeros(everybody.ranks, 3 + len(self._shared), dtype=torch.int64, device="cpu")
        table[everybody.rank] = torch.tensor([flags, *self._digests(record)])
        rows: list[list[int]] = table.tolist()
        if everybody.ranks > 1:
            rows = everybody.start_sum(table)().tolist()
        return rows

    def _digests(self, record: Record) -> list[int]:
        state, gradients = record["state"], record["gradients"]
        by_parameter: dict[int, Any] = {}
        plain: list[Any] = []
        for index, tensors in self._tape.state.items():  # type: ignore[union-attr]
            for name, tensor in tensors.items():
                if isinstance(tensor, nn.Parameter):
                    pair = state[str(index)][name], gradients[str(index)].get(name)
                    by_parameter[id(tensor)] = pair
                    plain += [] if is_dtensor(tensor) else [pair]
        shared = [
            next(
                (
                    by_parameter.get(id(self._modules[stage].get_parameter(name)))
                    for stage, name in holders
                    if stage in self._modules
                ),
                None,
            )
            for holders in self._shared
        ]
        return [_checksum(values) for values in ([*by_parameter.values()], plain, *shared)]

    def _difference(self, table: Sequence[Sequence[int]]) -> str:
        """Text on ranks whose copies of a tensor have different bits; empty if all are equal."""
        layout = self._groups.layout
        rules: list[tuple[str, Sequence[Sequence[int]]]] = [
            ("replicas", layout.copies),
            ("ranks along 'tp'", layout.sets("inner")),
        ]
        rules += [(f"the holders {[*holders]}", layout.pipelines) for holders in self._shared]
        for column, (text, sets) in enumerate(rules, 1):
            for ranks in sets:
                present = {rank: table[rank][column] for rank in ranks if table[rank][column]}
                if len({*present.values()}) > 1:
                    return (
                        f"parameters or gradients of {text} differ between the ranks {[*present]}"
                    )
        return ""

    # --- bundles ----------------------------------------------------------------------------------

    def _write(self, alarm: str, text: str) -> None:
        """Write this rank's part of the step. If the disk refuses it, warn."""
        everybody, tape = self._groups.everybody, self._tape
        path = Path(self._options.folder) / f"{self._run}-step-{self._step}"
        schedule = self._executor.schedule
        facts: dict[str, Any] = {
            "rank": everybody.rank,
            "ranks": everybody.ranks,
            "pipeline": self._groups.layout.index,
            "alarm": alarm,
            "text": text,
            "torch": torch.__version__,
            "device": self._device.type,
            "placement": schedule.placement,
            "row": [str(action) for action in schedule.ranks[self._groups.rank]],
            "wiring": None,
            "steps": [*self._ring],
            "stages": {},
        }
        if (wiring := self._executor.messages.dataflow.wiring) is not None:
            facts["wiring"] = asdict(wiring)
        sources: dict[str, str] = {}
        tensors: dict[str, Any] = {}
        if self._options.tensors and tape is not None:
            kept = {str(action): values for action, values in tape.kept.items()}
            tensors = {"state": tape.state, "kept": kept, "constants": {}}
            for index, stage in self._stages.items():
                come = self._gradients_come(index)
                stage_facts, programs, constants = programs_of(stage, tape.state[index], come)
                facts["stages"][str(index)] = stage_facts
                sources |= {f"stage-{index}/{name}.py": code for name, code in programs.items()}
                tensors["constants"][index] = constants
        with self._reporting(path):
            write_part(path, everybody.rank, everybody.ranks, facts, sources, _on_host(tensors))
            warnings.warn(
                f"the flight recorder wrote step {self._step} to {path}, because of {alarm}: "
                f"{text}. Run: autosplit replay {path}",
                stacklevel=2,
            )

    def _gradients_come(self, index: int) -> list[bool]:
        """For each output of a stage, whether the first backward got a gradient for it."""
        for name, row in self._ring[-1]["actions"].items():
            if name.startswith((f"{index}I", f"{index}B")) and "took" in row:
                return [digest is not None for digest in row["took"]]
        return []

    @contextlib.contextmanager
    def _reporting(self, path: Path) -> Iterator[None]:
        """Context that turns errors of the disk into warnings."""
        try:
            yield
        except OSError as error:
            warnings.warn(f"the flight recorder cannot write {path}: {error}", stacklevel=2)


def _checksum(value: object) -> int:
    """A checksum of digests as one number; 0 for None and for an empty value."""
    return crc32(repr(value).encode()) if value else 0


def _on_host(value: Any) -> Any:
    """The value, with its tensors as plain tensors in the host's memory."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _on_host(item) for name, item in value.items()}
    return [*map(_on_host, value)] if isinstance(value, list) else value
