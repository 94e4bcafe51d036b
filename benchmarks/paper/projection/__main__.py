"""``python -m benchmarks.paper.projection`` times a stage of each family on a CUDA device."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import autosplit
from autosplit.pipeline.engine.stages import footprint

from ...environment import describe
from ...split.clock import interleave
from ...split.contenders import eager
from ...split.models import SIZES, build
from . import STORED

SHARES = {"llama": 1 / 4, "bert": 1.0, "mamba": 1 / 4, "resnet": 1.0}
"""Of the whole model, in ``benchmarks.split.models.LARGE``."""


def measure(
    families: Sequence[str], size: str, device: str, rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each family: milliseconds of F, I and W, bytes saved and deferred."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for family in families:
        subject = build(family, SIZES[size][family], device, dtype)
        found = interleave({"autosplit": eager(subject)["autosplit"]()}, subject, rounds)
        stage = autosplit.Stage(subject.module, [subject.x.detach().requires_grad_()])
        saved, deferred = footprint(stage)
        yield {
            "family": family,
            "share": SHARES[family],
            "ms": found["autosplit"].medians(),
            "saved": saved,
            "deferred": deferred,
            "parameters": sum(
                each.numel() * each.element_size() for each in subject.module.parameters()
            ),
            "environment": describe(threads=torch.get_num_threads()),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=[*SHARES], choices=SHARES)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--size", default="large", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=15, help="timed microbatches of each")
    parser.add_argument("--output", type=pathlib.Path, default=STORED / "gpu.json")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu only shows that this works")
    rows = [*measure(options.families, options.size, options.device, options.rounds)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"stages": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
