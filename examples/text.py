"""Real English text that every Python installation carries, as bytes to train on.

The language reference behind `help()` (`pydoc_data.topics`) and the docstrings of the
standard library: about 0.8 MB, found through importlib. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autosplit.errors import PipelineError

TOPICS = "pydoc_data.topics"

MASK = 256  # the first number that is no byte
MASKED = 0.15
IGNORED = -100  # what cross_entropy leaves out

# Modules with much prose in their docstrings. None of them is imported, only read.
MODULES = (
    "argparse",
    "collections",
    "configparser",
    "difflib",
    "doctest",
    "inspect",
    "ipaddress",
    "logging",
    "random",
    "shutil",
    "smtplib",
    "statistics",
    "subprocess",
    "tarfile",
    "threading",
    "turtle",
    "typing",
)


def batch(step: int, size: int, seq: int) -> tuple[Tensor, Tensor]:
    """Windows of the text for one training step, the same on every call and every rank.

    Returns:
        inputs and targets, int64 [size, seq] of byte values; `targets[:, i]` is the byte
        that follows `inputs[:, i]`.

    Raises:
        PipelineError: no text was found, or a window of `seq + 1` bytes is longer than it.
    """
    text = corpus()
    if seq + 1 > len(text):
        raise PipelineError(
            f"a window of seq + 1 = {seq + 1} bytes does not fit the text of {len(text)} bytes; "
            "use a shorter seq"
        )
    starts = torch.randint(
        len(text) - seq, (size,), generator=torch.Generator().manual_seed(step)
    ).tolist()
    windows = torch.stack([text[start : start + seq + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def masked_batch(step: int, size: int, seq: int) -> tuple[Tensor, Tensor]:
    """As `batch`, for a model that restores what is masked (Devlin et al., arXiv 1810.04805).

    Returns:
        inputs, int64 [size, seq] of byte values, in which `MASKED` of the positions of each
        sample (at least one) are `MASK`; and targets: the byte that was there, `IGNORED`
        elsewhere.

    Raises:
        PipelineError: as `batch`.
    """
    whole, _ = batch(step, size, seq)
    order = torch.rand(size, seq, generator=torch.Generator().manual_seed(step)).argsort(1)
    hidden = order < max(1, round(MASKED * seq))
    return whole.masked_fill(hidden, MASK), whole.masked_fill(~hidden, IGNORED)


@functools.cache
def corpus() -> Tensor:
    """The whole text, uint8 [bytes]; read once a process, since parsing takes half a second."""
    return torch.frombuffer(bytearray(read_text()), dtype=torch.uint8)


def read_text(topics: str = TOPICS, modules: Sequence[str] = MODULES) -> bytes:
    """Text of the help topics, then the docstrings of `modules`, UTF-8 encoded.

    A Python without the topics, or without the sources of some modules (frozen, or shipped
    as bytecode only), gives what it has.

    Raises:
        PipelineError: there is nothing at all.
    """
    parts = [*_topics(topics), *(text for name in modules for text in _docstrings(name))]
    if not parts:
        raise PipelineError(
            f"no text to train on: expected help topics in the module {topics!r} or sources of "
            f"{', '.join(modules) or 'any module'}, found neither; "
            "use a Python with its standard library's sources"
        )
    return "\n\n".join(parts).encode()


def _topics(module: str) -> Iterator[str]:
    try:
        topics: Mapping[str, str] = importlib.import_module(module).topics
    except (ImportError, AttributeError):
        return
    for name in sorted(topics):
        yield topics[name]


def _docstrings(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(_source(module) or "")):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def _source(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
        read = getattr(spec.loader, "get_source", None) if spec else None
        return read(module) if read else None
    except (ImportError, OSError):
        return None
