"""A benchmark's page: its sections, what is measured for each, and the command that does both."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import pathlib
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from .results import Results, Rows, describe

S = TypeVar("S")

HERE = pathlib.Path(__file__).parent
_SECONDS = 20.0

KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Under which glibc's malloc gives nothing back to the system, as allocators made for training.

Left to itself, it gives memory back and takes it anew, page by page, in every step; how much
depends on what happens to lie at the end of the heap.
"""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and logs, which a table's progress would be lost in."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


@dataclasses.dataclass(frozen=True)
class Part(Generic[S]):
    """One section, measured under settings of type ``S``.

    Attributes:
        title: its heading.
        about: what was done.
        measure: gives rows, each with a ``name`` of its own.
        render: rows -> table and verdicts.
    """

    title: str
    about: str
    measure: Callable[[S], Iterable[dict[str, Any]]]
    render: Callable[[Rows], str]


def option(default: Any, about: str = "", choices: Iterable[Any] | None = None) -> Any:
    """A field of settings that is an option of the command; tuples take several values."""
    known = None if choices is None else [*choices]
    return dataclasses.field(default=default, metadata={"help": about, "choices": known})


@dataclasses.dataclass(frozen=True)
class Page(Generic[S]):
    """``README.md`` and ``results.json`` of a benchmark.

    Attributes:
        name: of its folder.
        text: the page, with places for ``environment``, ``head``, ``sections`` and ``commands``.
        parts: its sections by name, in order.
        settings: a dataclass of ``option``s. Where it has a ``device``, what was measured on
            another than the CPU has sections of its own.
        keeping: whether memory that was freed is kept, see ``KEEPING``.
        head: of all results together.
        also: other files that are made of the results, and of what was there.
    """

    name: str
    text: str
    parts: Mapping[str, Part[S]]
    settings: type[S]
    keeping: bool = False
    head: Callable[[Results], str] = lambda results: ""
    also: Mapping[pathlib.Path, Callable[[Results, str], str]] = dataclasses.field(
        default_factory=dict
    )

    def render(self, results: Results) -> str:
        """Of the parts that were measured, each with the command of its last run."""
        keys = sorted(results.parts, key=self._place)
        environment = next((results.parts[key]["environment"] for key in keys), "")
        return self.text.format(
            environment=environment,
            head=self.head(results),
            sections="".join(self._section(key, results.parts[key], environment) for key in keys),
            commands="\n".join(results.parts[key]["commands"][-1] for key in keys),
        )

    def _place(self, key: str) -> tuple[bool, int]:
        name, on, _ = key.partition(" on ")
        return bool(on), [*self.parts].index(name)

    def _section(self, key: str, found: dict[str, Any], environment: str) -> str:
        name, _, device = key.partition(" on ")
        part = self.parts[name]
        title = f"\n## {part.title}" + (f", {device}" if device else "")
        own = [f"{found['environment']}."] if found["environment"] != environment else []
        return "\n\n".join([title, *own, part.about, part.render(found["rows"])]) + "\n"

    def write(self, results: Results) -> None:
        """The page beside the results, and what else is made of these."""
        (results.path.parent / "README.md").write_text(self.render(results))
        if results.path.parent == HERE / self.name:
            for path, render in self.also.items():
                path.write_text(render(results, path.read_text()))

    @quiet()
    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure parts; each row is kept, and the page written, as soon as it is there."""
        options, settings = self._options(arguments)
        if self.keeping and arguments is None and any(name not in os.environ for name in KEEPING):
            # Malloc reads its settings only at the start of a process.
            command = [sys.executable, "-m", f"benchmarks.{self.name}", *sys.argv[1:]]
            os.execve(sys.executable, command, os.environ | KEEPING)
        options.output.mkdir(parents=True, exist_ok=True)
        results = Results.read(options.output / "results.json")
        device = getattr(settings, "device", "cpu")
        for name in options.parts or self.parts:
            key = name if device == "cpu" else f"{name} on {device}"
            words = ["python", "-m", f"benchmarks.{self.name}", name, *self._words(settings)]
            found = tqdm(self.parts[name].measure(settings), desc=name, mininterval=5)
            for rows in _now_and_then(found):
                results.update(key, rows, shlex.join(words), describe(settings))
                self.write(results)
            tqdm.write(
                f"\n{self.parts[name].title}\n\n{self.parts[name].render(results.rows(key))}"
            )

    def _options(self, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, S]:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}")
        for each in self._fields():
            kind: dict[str, Any] = {"default": each.default, **each.metadata}
            if isinstance(each.default, bool):
                kind = {"action": "store_true", "help": each.metadata["help"]}
            elif isinstance(each.default, tuple):
                kind |= {"nargs": "+", "type": type(each.default[0])}
            else:
                kind["type"] = type(each.default)
            parser.add_argument(_flag(each), **kind)
        parser.add_argument(
            "--output", type=pathlib.Path, default=HERE / self.name, help="folder to write to"
        )
        options = parse(parser, self.parts, arguments=arguments)
        found = {each.name: getattr(options, each.name) for each in self._fields()}
        found = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
        return options, self.settings(**found)

    def _fields(self) -> Iterator[dataclasses.Field[Any]]:
        return (each for each in dataclasses.fields(self.settings) if each.metadata)  # type: ignore[arg-type]

    def _words(self, settings: S) -> Iterator[str]:
        """The options that are not as by default."""
        for each in self._fields():
            value = getattr(settings, each.name)
            if value != each.default:
                yield _flag(each)
                if not isinstance(value, bool):
                    yield from map(str, value if isinstance(value, tuple) else [value])


def _now_and_then(found: Iterable[dict[str, Any]]) -> Iterator[Rows]:
    """Rows as they come, those of some seconds together: all of them, whatever ends the run."""
    rows: Rows = []
    last = -_SECONDS
    try:
        for each in found:
            rows.append(each)
            if time.monotonic() - last > _SECONDS:
                yield rows
                rows, last = [], time.monotonic()
    finally:
        if rows:
            yield rows


def _flag(field: dataclasses.Field[Any]) -> str:
    return f"--{field.name.replace('_', '-')}"


def parse(
    parser: argparse.ArgumentParser,
    known: Iterable[str],
    kind: str = "part",
    arguments: Sequence[str] | None = None,
) -> argparse.Namespace:
    """The options, with the names of the parts to measure as ``parts`` (or another ``kind``).

    Names that are not ``known`` end the program with a message that lists those that are.
    """
    names, plural = list(known), f"{kind}s"
    parser.add_argument(plural, nargs="*", help=f"which of {', '.join(names)}; all by default")
    options = parser.parse_args(arguments)
    unknown = sorted(set(getattr(options, plural)) - set(names))
    if unknown:
        parser.error(f"unknown {kind} {unknown[0]!r}; known {plural}: {', '.join(names)}")
    return options
