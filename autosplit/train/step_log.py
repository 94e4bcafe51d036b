"""What is told of each step: a bar on a terminal, and a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tqdm import tqdm

from autosplit.errors import PipelineError
from autosplit.text.byte_sizes import size_text
from autosplit.text.reading import read_text
from autosplit.text.writing import writing


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        step: how many steps the run has made with it.
        loss: the mean over the batch.
        grad_norm: of the whole model's gradient, before it was clipped.
        seconds: that the step took.
        tokens_per_s: tokens that it trained on, a second.
        bubble: idle time over total time of the ranks.
        memory: the most bytes that each rank has held, from the step on that measured it.
    """

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tokens_per_s: float
    bubble: float
    memory: Sequence[int] | None = None


class StepLog:
    """Tells of steps; on ranks other than 0 nothing happens.

    Args:
        file: of JSON lines, or None. Lines of later steps than ``start`` go: a run that is resumed
            makes them again.
        start: steps made before.
        steps: at which to end.
        speaks: whether this is the rank that tells.

    Raises:
        OutputError: the file cannot be written.
        PipelineError: a run is resumed whose file holds something else.
    """

    def __init__(self, file: Path | None, start: int, steps: int, *, speaks: bool) -> None:
        # None: shown on a terminal, not in a file.
        self._bar = tqdm(total=steps, initial=start, unit="step", disable=None if speaks else True)
        self._stream: IO[str] | None = None
        if file is not None and speaks:
            kept = _lines_up_to(start, file)
            with writing(file):
                self._stream = file.open("w", encoding="utf-8")
                self._stream.writelines(kept)

    def tell(self, record: StepRecord) -> None:
        """Show a step and write it down."""
        self._bar.update(record.step - self._bar.n)
        self._bar.set_postfix_str(in_words(record))
        if self._stream is not None:
            self._stream.write(json.dumps(asdict(record)) + "\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        if self._stream is not None:
            self._stream.close()


def in_words(record: StepRecord) -> str:
    """What stands behind the bar."""
    said = (
        f"loss {record.loss:.4f}, {record.tokens_per_s:,.0f} tokens/s, bubble {record.bubble:.0%}"
    )
    return said if record.memory is None else f"{said}, memory {size_text(max(record.memory))}"


def _lines_up_to(step: int, file: Path) -> list[str]:
    if step == 0 or not file.exists():
        return []
    try:
        lines = read_text(file, "the history", PipelineError).splitlines(keepends=True)
        return [line for line in lines if json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"--history {str(file)!r} is to go on behind step {step}, and is no history of "
            "autosplit train: give another file"
        ) from error
