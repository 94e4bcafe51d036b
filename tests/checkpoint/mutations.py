"""Damages checkpoints at random and looks at what loading them does."""

from __future__ import annotations

import copy
import json
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_saver as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autosplit.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from autosplit.checkpoint.writer import unworried
from autosplit.errors import CheckpointError
from autosplit.pipeline import PipelineTrainer

OPERATIONS = ("flip", "set", "cut", "drop", "double", "insert", "exchange", "remove")
SECONDS = 20.0  # beyond which a load counts as hanging


@dataclass(frozen=True)
class Mutation:
    """One thing that befalls one file.

    Attributes:
        operation: one of ``OPERATIONS``.
        file: which file, as a part of all.
        place: where in it, likewise.
        length: of how many bytes.
        value: a byte.
    """

    operation: str
    file: float
    place: float
    length: int
    value: int

    def apply(self, path: Path) -> None:
        """To the file or folder ``path``."""
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
        if not files:
            return
        file = files[int(self.file * len(files))]
        content = bytearray(file.read_bytes())
        at = int(self.place * len(content))
        span = slice(at, at + self.length)
        match self.operation:
            case "flip" if content:
                content[at] ^= 1 << self.value % 8
            case "set":
                content[span] = bytes([self.value]) * len(content[span])
            case "cut":
                del content[at:]
            case "drop":
                del content[span]
            case "double":
                content[at:at] = content[span]
            case "insert":
                content[at:at] = bytes([self.value]) * self.length
            case "exchange":
                content = bytearray(files[int(self.place * len(files))].read_bytes())
            case "remove":
                file.unlink()
                return
        file.write_bytes(bytes(content))


_part = st.floats(0, 1, exclude_max=True)
MUTATIONS = st.lists(
    st.builds(
        Mutation, st.sampled_from(OPERATIONS), _part, _part, st.integers(1, 64), st.integers(0, 255)
    ),
    min_size=1,
    max_size=3,
)


class Bench:
    """A trainer in one process, all of whose state can be set and looked at."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        modules = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]
        model = nn.Sequential(*modules)
        self.engine = PipelineTrainer(
            [_Named("0", model[0]), _Named("1", model[1])],
            nn.functional.mse_loss,
            lambda parameters: torch.optim.AdamW(parameters),
            microbatches=1,
            ranks=1,
        )
        optimizer = self.engine.optimizer
        if optimizer is None:
            raise RuntimeError("the trainer has parameters, and so an optimizer")
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.engine.step((torch.randn(2, 4), torch.randn(2, 4)))
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        """All of it, as values."""
        return copy.deepcopy(
            {
                "modules": self.engine.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "generator": torch.get_rng_state(),
            }
        )

    def set(self, state: dict[str, Any]) -> None:
        """Back to what ``state`` gave."""
        for index, values in state["modules"].items():
            self.engine.modules[index].load_state_dict(values)
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
        torch.set_rng_state(state["generator"])


class _Named(nn.Module):
    """A stage whose names are those of the whole model."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


@dataclass(frozen=True)
class Form:
    """A kind of checkpoint.

    Attributes:
        write: makes one for a bench in a folder, and says where.
        whole: whether it has the run as well as the model.
        checked: whether every damage can be noticed.
    """

    write: Callable[[Bench, Path], Path]
    whole: bool
    checked: bool


def _state_dict(bench: Bench) -> dict[str, Tensor]:
    return {n: v for state in bench.engine.state_dict().values() for n, v in state.items()}


def _own(bench: Bench, folder: Path) -> Path:
    extra = {"seen": [1, 2, 3]}
    save_checkpoint(bench.engine, folder / "it", scheduler=bench.scheduler, step=7, extra=extra)
    return folder / "it"


def _torchs(bench: Bench, folder: Path) -> Path:
    with unworried():
        dcp.save({"model": _state_dict(bench)}, checkpoint_id=folder / "it", no_dist=True)
    return folder / "it"


def _file(bench: Bench, folder: Path) -> Path:
    torch.save(_state_dict(bench), folder / "it.pt")
    return folder / "it.pt"


def _old_file(bench: Bench, folder: Path) -> Path:
    torch.save(_state_dict(bench), folder / "it.pt", _use_new_zipfile_serialization=False)
    return folder / "it.pt"


def _indexed(bench: Bench, folder: Path) -> Path:
    from safetensors.torch import save_file

    state = _state_dict(bench)
    (folder / "it").mkdir()
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state)}
    for file in {*files.values()}:
        own = {name: value for name, value in state.items() if files[name] == file}
        save_file(own, folder / "it" / file)
    (folder / "it" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder / "it"


FORMS = {
    "save_checkpoint": Form(_own, whole=True, checked=True),
    "torch.distributed.checkpoint": Form(_torchs, whole=False, checked=True),
    "torch.save": Form(_file, whole=False, checked=True),
    "torch.save, old form": Form(_old_file, whole=False, checked=False),
    "safetensors with an index": Form(_indexed, whole=False, checked=False),
}


class WrongError(Exception):
    """A damaged checkpoint was not handled as it should be."""


class Judge:
    """Loads damaged copies of one checkpoint.

    Args:
        form: one of ``FORMS``.
        folder: an empty one.

    Attributes:
        outcomes: how often what came of them.
    """

    def __init__(self, form: str, folder: Path) -> None:
        self._form = FORMS[form]
        self._bench = Bench()
        self._expected = self._bench.state()
        self._folder = folder
        (folder / "sound").mkdir()
        self._sound = self._form.write(self._bench, folder / "sound")
        self._read = read_checkpoint(self._sound)
        torch.manual_seed(99)
        self._bench.engine.step((torch.randn(2, 4), torch.randn(2, 4)))
        self._other = self._bench.state()
        self.outcomes: Counter[str] = Counter()

    def __call__(self, mutations: list[Mutation]) -> None:
        """Damage a copy and load it.

        Raises:
            WrongError: it hung, raised another error than CheckpointError, or loaded wrong values.
        """
        path = self._folder / self._sound.name
        _remove(path)
        if self._sound.is_dir():
            shutil.copytree(self._sound, path)
        else:
            shutil.copy(self._sound, path)
        for mutation in mutations:
            mutation.apply(path)
        self._bench.set(self._other)
        try:
            with limited(SECONDS), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.outcomes[self._load(path)] += 1
        except WrongError:
            raise
        except BaseException as error:
            raise WrongError(f"{mutations} gave {type(error).__name__}: {error}") from error

    def _load(self, path: Path) -> str:
        bench = self._bench
        scheduler = bench.scheduler if self._form.whole else None
        try:
            loaded = load_checkpoint(bench.engine, path, scheduler=scheduler)
        except CheckpointError:
            if not _equal(bench.state(), self._other):
                raise WrongError("it was refused, but something was loaded") from None
            outcome = "refused"
        else:
            expected = {**self._other, "modules": self._expected["modules"]}
            expected = self._expected if self._form.whole else expected
            right = _equal(bench.state(), expected)
            if self._form.whole:
                right = right and (loaded.step, loaded.extra) == (7, {"seen": [1, 2, 3]})
            if not right and self._form.checked:
                raise WrongError("wrong values were loaded")
            outcome = "loaded right" if right else "loaded, cannot be checked"
        try:
            read = read_checkpoint(path)
        except CheckpointError:
            return outcome
        # Which names a folder of torch's own has cannot be checked without a model.
        if self._form.checked and not all(
            torch.equal(value, self._read[name])
            for name, value in read.items()
            if name in self._read
        ):
            raise WrongError("wrong values were read")
        return outcome


def search(form: str, count: int, folder: Path) -> Counter[str]:
    """What came of ``count`` damaged checkpoints.

    Args:
        form: one of ``FORMS``.
        count: how many.
        folder: an empty one.

    Raises:
        WrongError: the smallest damage that was not handled as it should be.
    """
    judge = Judge(form, folder)

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(MUTATIONS)
    def look(mutations: list[Mutation]) -> None:
        judge(mutations)

    look()
    return judge.outcomes


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer; in the main thread only."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # Damaged values may be no numbers.
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
