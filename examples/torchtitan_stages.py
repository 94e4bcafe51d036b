"""torchtitan's Llama in a pipeline of split stages:
``torchrun --nproc-per-node 2 -m examples.torchtitan_stages``.

Everything is torchtitan's: the model and how it is cut, sharded and checkpointed, the schedule. It
makes its stages of what it has imported as ``PipelineStage``, which ``use`` exchanges. With
torchtitan's own trainer, the same line stands in a module that ``--experimental.custom_import``
names.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims, pipeline_parallel
from torchtitan.protocols.train_spec import get_train_spec

from autosplit import SplitPipelineStage

if not torch.accelerator.is_available():
    parallel_dims.device_type = "cpu"  # torchtitan takes an accelerator for granted

LAYERS = 4
TOKENS = 32
ROWS = 8


def use(stage: type[Any] = SplitPipelineStage) -> None:
    """Have torchtitan make such stages."""
    pipeline_parallel.PipelineStage = stage


def configuration(schedule: str = "ZBVZeroBubble", *, checkpointing: str = "none") -> JobConfig:
    """Of options as torchtitan's command takes them."""
    options = {
        "training.seq_len": TOKENS,
        "training.local_batch_size": ROWS,
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": schedule,
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        "activation_checkpoint.mode": checkpointing,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ConfigManager().parse_args(words)


class Run:
    """A model on this rank and its optimizer."""

    def __init__(self, config: JobConfig) -> None:
        spec = get_train_spec("llama3")
        known: Any = spec.model_args["debugmodel"]
        arguments = dataclasses.replace(known, dim=64, n_layers=LAYERS, n_heads=4, vocab_size=256)
        arguments.update_from_config(config)
        self.vocabulary = arguments.vocab_size
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device(parallel_dims.device_type, local)
        with torch.device("meta"):
            model = spec.model_cls(arguments)
        dimensions = ParallelDims(
            dp_replicate=1,
            dp_shard=-1,
            cp=1,
            tp=config.parallelism.tensor_parallel_degree,
            pp=config.parallelism.pipeline_parallel_degree,
            ep=1,
            etp=1,
            world_size=dist.get_world_size(),
        )
        dimensions.build_mesh()
        pipelining: Any = spec.pipelining_fn
        loss = spec.build_loss_fn(config)
        parallelize = spec.parallelize_fn
        self.schedule, self.parts, self.first, self.last = pipelining(
            model, dimensions, config, self.device, arguments, parallelize, loss
        )
        for part in self.parts:
            part.to_empty(device=self.device.type)
            torch.manual_seed(0)
            with torch.no_grad():
                part.init_weights()
            part.train()
        parameters = [p for part in self.parts for p in part.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    def step(self, seed: int) -> float | None:
        """One step on random tokens; the rank of the last stage has the loss of a token."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.vocabulary, (ROWS, TOKENS + 1), generator=generator)
        ids = ids.to(self.device)
        losses: list[Tensor] = []
        given: dict[str, Any] = {"return_outputs": False}
        if self.last:
            given |= {"target": ids[:, 1:], "losses": losses}
        self.schedule.step(*((ids[:, :-1],) if self.first else ()), **given)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / (ROWS * TOKENS) if self.last else None


def main(steps: int = 3) -> None:
    """Train on the ranks that torchrun has started."""
    dist.init_process_group()
    use()
    run = Run(configuration())
    for seed in range(steps):
        loss = run.step(seed)
        if loss is not None:
            print(f"step {seed}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
