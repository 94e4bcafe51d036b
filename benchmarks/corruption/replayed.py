"""The time of a replay of one action of a deep Llama stage."""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from autosplit.pipeline import PipelineTrainer, Recorder, RunOptions
from autosplit.pipeline.schedule.schedule import METHODS, Action, ActionKind
from autosplit.recorder.bundle import read_parts
from autosplit.recorder.faults import FaultSearch
from autosplit.recorder.replay import StepReplay

ACTIONS = {"F": "1F0", "I": "1I0", "W": "1W0", "F with a NaN in a sample": "1F2"}
_VOCABULARY, _TOKENS, _SAMPLES, _MICROBATCHES = 256, 32, 8, 4
_TIMES = 3


class Decoder(nn.Module):
    """The layers of a Llama."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        config = AutoConfig.for_model(
            "llama",
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=2 * width,
            num_attention_heads=4,
            max_position_embeddings=_TOKENS,
            vocab_size=_VOCABULARY,
        )
        self.model: Any = AutoModel.from_config(config).train()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(inputs_embeds=x, use_cache=False).last_hidden_state
        return result


def record(folder: str, layers: int, width: int) -> pathlib.Path:
    """The bundle of a step in which one sample has a token whose embedding is NaN."""
    torch.manual_seed(0)
    embedding = nn.Embedding(_VOCABULARY, width)
    embedding.weight.data[0] = torch.nan
    stages = [embedding, Decoder(layers, width), nn.Linear(width, _VOCABULARY)]
    ids = torch.randint(1, _VOCABULARY, (_SAMPLES, _TOKENS))
    ids[5, 7] = 0
    with PipelineTrainer(
        stages,
        lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        torch.optim.SGD,
        stages=len(stages),
        microbatches=_MICROBATCHES,
        ranks=1,
        run_options=RunOptions(recorder=Recorder(folder), nonfinite="skip"),
    ) as trainer:
        trainer.step(ids, target=ids)
    (bundle,) = pathlib.Path(folder).iterdir()
    return bundle


def replay(bundle: pathlib.Path, action: Action) -> tuple[float, float, str]:
    """Seconds to read the parts and the programs, seconds to run the action, and what is found."""
    start = perf_counter()
    step = StepReplay(read_parts(bundle))
    for kind in METHODS:  # the programs before it are run, too
        if kind is not ActionKind.BACKWARD:
            step.program(Action(action.stage, kind, action.microbatch))
        if kind is action.kind:
            break
    read = perf_counter()
    ((_, text),) = FaultSearch(step).findings([action])
    return read - start, perf_counter() - read, text


def measure(layers: int, width: int) -> Iterator[dict[str, Any]]:
    """A row for each action."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = record(folder, layers, width)
        size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
        for name, text in ACTIONS.items():
            seconds = []
            for _ in range(_TIMES):
                command = [
                    sys.executable,
                    "-m",
                    "autosplit",
                    "replay",
                    str(bundle),
                    "--action",
                    text,
                ]
                start = perf_counter()
                subprocess.run(command, capture_output=True)
                seconds.append((perf_counter() - start, *replay(bundle, Action.parse(text))))
            commands, reading, running, texts = zip(*seconds, strict=True)
            yield {
                "name": f"{name}, {width} wide",
                "layers": layers,
                "bytes": size,
                "command": statistics.median(commands),
                "reading": statistics.median(reading),
                "running": statistics.median(running),
                "text": texts[0],
            }
