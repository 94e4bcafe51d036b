"""What ranks keep of their microbatches under each schedule: stages weighed after each action."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosplit.compare.rank import peak_bytes
from autosplit.pipeline import RunOptions, StageOptions
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.engine.launch import launch
from autosplit.pipeline.engine.stages import footprint
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.trainer import PipelineTrainer
from autosplit.stage import Stage
from examples.decoder import Block, LlamaConfig, Rotary

from ..results import Rows, table

BASELINE = "1f1b, fused"
CONFIG = LlamaConfig(dim=128, heads=2, kv_heads=2, hidden=352, seq=64)
LAYERS = 2  # on each rank
MEASURED = (4, 8)  # ranks
PROJECTED = (16, 32, 64)
TARGET = 1.02  # kept over the formula

# Of the activations of fused 1F1B's first rank, for P ranks; see each schedule's docstring.
FORMULAS: dict[str, Callable[[int], float]] = {
    BASELINE: lambda ranks: 1.0,
    "zb-h1": lambda ranks: 1.0,
    "zb-h2": lambda ranks: (2 * ranks - 1) / ranks,
    "zb-v": lambda ranks: 1.0,
    "v-half": lambda ranks: (ranks // 2 + 1) / ranks,
    "v-min": lambda ranks: math.ceil((ranks + 2) / 3) / ranks,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """Bytes on the fullest rank.

    Attributes:
        name: the number of ranks and the schedule.
        ranks: how many.
        schedule: its name.
        kept: distinct storage between F and W; 0 where nothing was run.
        simulated: the same by ``peak_memory``, in units of one microbatch on a rank where nothing
            was run.
        allocated: all that a step allocates, gradients and temporaries included.
    """

    name: str
    ranks: int
    schedule: str
    kept: int
    simulated: float
    allocated: int


class Layers(nn.Module):
    """Like blocks of the decoder and nothing else, so that every stage keeps the same."""

    def __init__(self, config: LlamaConfig, count: int) -> None:
        super().__init__()
        self.rotary = Rotary(config.dim // config.heads, config.seq, config.rope_base)
        self.blocks = nn.ModuleList(Block(config) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.rotary)
        return x


class Scale:
    """The most that the stages of one rank have kept so far."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.most = 0

    def weigh(self) -> None:
        """Note what they keep now."""
        now = sum(stage.saved_bytes + stage.deferred_bytes for stage in self.stages)
        self.most = max(self.most, now)


class Weighed:
    """A stage that is weighed, with the others of its rank, after each action."""

    def __init__(self, module: nn.Module, args: list[Tensor], *, index: int, scale: Scale) -> None:
        self._stage = Stage(module, args, index=index, late_input=True)  # as a trainer does
        self._scale = scale
        self.output_specs = self._stage.output_specs
        self.publish = self._stage.publish
        scale.stages.append(self._stage)

    def forward(self, microbatch: int, inputs: list[Tensor]) -> list[Tensor]:
        outputs = self._stage.forward(microbatch, inputs)
        self._scale.weigh()
        return outputs

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        gradients = self._stage.backward_input(microbatch, output_grads)
        self._scale.weigh()
        return gradients

    def backward_weight(self, microbatch: int) -> None:
        self._stage.backward_weight(microbatch)

    def backward(self, microbatch: int, output_grads: list[Tensor | None]) -> list[Tensor | None]:
        return self._stage.backward(microbatch, output_grads)


def schedules(ranks: int) -> list[Schedule]:
    """Those with a formula, for M = 2P."""
    found = []
    for name in FORMULAS:
        family = name.removesuffix(", fused")
        chunks, fused = SCHEDULES[family].chunks or 1, family != name
        built = build(family, ranks * chunks, 2 * ranks, ranks=ranks, split_backward=not fused)
        found.append(dataclasses.replace(built, name=name, crosses_step=False))
    return found


def measure_all() -> Rows:
    """Runs the small pipelines and projects the large ones."""
    rows = [row for ranks in MEASURED for row in measure(schedules(ranks), CONFIG)]
    rows += [row for ranks in PROJECTED for row in projected(ranks)]
    return [dataclasses.asdict(row) for row in rows]


def measure(cases: Sequence[Schedule], config: LlamaConfig) -> list[Row]:
    """One step of each case on as many processes as it has ranks; all must have the same."""
    (ranks,) = {len(case.ranks) for case in cases}
    return launch(_on_rank, ranks, (list(cases), config), timeout=600.0)[0]


def _on_rank(cases: list[Schedule], config: LlamaConfig) -> list[Row]:
    return [_run(case, config) for case in cases]


def _run(schedule: Schedule, config: LlamaConfig) -> Row:
    scale, ranks = Scale(), len(schedule.ranks)
    layers = LAYERS * ranks // schedule.stages
    trainer = PipelineTrainer(
        lambda index: Layers(config, layers),
        lambda output, target: output.sum(),
        torch.optim.SGD,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        schedule=schedule,
        stage_options=StageOptions(stage_factory=functools.partial(Weighed, scale=scale)),
        run_options=RunOptions(timeout=120.0),
    )
    x = torch.randn(schedule.microbatches, config.seq, config.dim)
    batch = (x, x[:, 0, 0].clone())

    def step() -> None:
        trainer.forward_backward(batch)
        for module in trainer.modules.values():
            module.zero_grad(set_to_none=True)

    with trainer:
        step()
        allocated = peak_bytes(step, [], torch.device("cpu"))
        sizes = {stage.index: footprint(stage) for stage in scale.stages}
        found: list[tuple[int, int, dict[int, tuple[float, float]]]] = [(0, 0, {})] * ranks
        dist.all_gather_object(found, (scale.most, allocated, sizes))
    every = {index: size for _, _, sizes in found for index, size in sizes.items()}
    memory = [StageMemory(*every[index]) for index in range(schedule.stages)]
    return Row(
        f"{ranks} ranks: {schedule.name}",
        ranks,
        schedule.name,
        max(most for most, _, _ in found),
        max(peak_memory(schedule, memory)),
        max(each for _, each, _ in found),
    )


def projected(ranks: int) -> list[Row]:
    """Counted in microbatches of a rank's share of the model, W keeping all that I did."""
    rows = []
    for schedule in schedules(ranks):
        share = ranks / schedule.stages
        peak = max(peak_memory(schedule, [StageMemory(share, share)] * schedule.stages))
        name = f"{ranks} ranks: {schedule.name}"
        rows.append(Row(name, ranks, schedule.name, 0, peak, 0))
    return rows


def render(rows: Rows) -> str:
    """A table of what was run and one of what was only counted."""
    base = {row["ranks"]: row for row in rows if row["schedule"] == BASELINE}
    ran = [row for row in rows if row["kept"]]
    cells = [
        [
            str(row["ranks"]),
            row["schedule"],
            f"{row['kept'] / 2**20:.2f}",
            f"{row['kept'] / row['simulated']:.3f}",
            *_against(row["kept"] / base[row["ranks"]]["kept"], row),
            f"{row['allocated'] / base[row['ranks']]['allocated']:.3f}x",
        ]
        for row in ran
    ]
    headers = ["ranks", "schedule", "kept MiB", "over simulated", "over fused 1F1B", "formula"]
    text = table([*headers, "allocated, over fused 1F1B"], cells)
    counted = [
        [
            str(row["ranks"]),
            row["schedule"],
            *_against(row["simulated"] / base[row["ranks"]]["simulated"], row),
        ]
        for row in rows
        if not row["kept"]
    ]
    headers = ["ranks", "schedule", "over fused 1F1B", "formula"]
    return f"{text}\n\nCounted by the simulator:\n\n{table(headers, counted)}"


def _against(ratio: float, row: dict[str, object]) -> tuple[str, str]:
    """A ratio, bold where it is over its formula, and the formula."""
    formula = FORMULAS[str(row["schedule"])](int(str(row["ranks"])))
    figure = f"{ratio:.3f}x"
    return (figure if ratio <= TARGET * formula else f"**{figure}**", f"{formula:.3f}x")
