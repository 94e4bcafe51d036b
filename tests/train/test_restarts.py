"""A rank that is killed: torchrun's agent starts all again, and they go on from the checkpoint."""

from __future__ import annotations

import json
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.interpreters import Servers, interpreters
from tests.ranks import Ranks

STEPS, KILLED = 4, 4  # saved behind the second step


def settings(folder: str, name: str) -> Any:
    from autosplit.train.language_model import TrainSettings

    return TrainSettings(
        "tests.train.models:causal", Path(folder) / "text", 2,
        steps=STEPS, length=8, learning_rate=0.01, estimate=True, resume=True,
        checkpoint=Path(folder) / name, every=2, history=Path(folder) / f"{name}.jsonl",
    )  # fmt: skip


def rank(folder: str, name: str) -> None:
    """Train; where the agent has started the ranks for the first time, one dies at a step."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from autosplit.train.run import StepLog, train

    tell = StepLog.tell

    def told(log: StepLog, record: Any) -> None:
        tell(log, record)
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if name == "killed" and first and os.environ["RANK"] == "1" and record.step == KILLED - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    StepLog.tell = told  # type: ignore[method-assign]
    train(settings(folder, name))


def agent(folder: str, servers: Servers, pipe: Connection) -> None:
    """What ``torchrun --nproc-per-node 2 --max-restarts 1`` does."""
    servers.join(ranks=True)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, start_method="forkserver",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="restarts", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, rank)(folder, "killed")
    pipe.send("done")


def uninterrupted(folder: str) -> None:
    from autosplit.train.run import train_on_rank

    train_on_rank(settings(folder, "whole"))


def test_losses_are_those_of_a_run_that_nothing_happened_to(
    tmp_path: Path, on_ranks: Ranks
) -> None:
    (tmp_path / "text").write_text("Nobody waits for the gradient of the weights. " * 8)
    on_ranks(uninterrupted, 2, (str(tmp_path),), timeout=60)
    ours, theirs = interpreters().Pipe(duplex=False)
    process = interpreters().Process(target=agent, args=(str(tmp_path), Servers.running(), theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(120), "the ranks that were started again do not end"
        assert ours.recv() == "done"
    finally:
        process.join(10)
        process.kill()
    losses = [
        [
            (row["step"], row["loss"])
            for row in map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
        ]
        for name in ("whole", "killed")
    ]
    assert [step for step, _ in losses[1]] == [*range(1, STEPS + 1)]
    assert losses[0] == losses[1]
