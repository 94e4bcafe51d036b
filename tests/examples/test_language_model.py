"""A language model trained on a text: as in one process, over other ranks, and past a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from autosplit.checkpoint import read_checkpoint
from autosplit.errors import CheckpointError
from examples import language_model
from examples.language_model import Settings, Windows, read_tokens
from tests.interpreters import Servers, interpreters
from tests.kept_ranks import Ranks

STEPS, KILLED = 4, 3  # saved behind the second step


@pytest.fixture
def run(tmp_path: Path) -> Settings:
    """Over a folder with a tiny Llama and its weights, whose tokens are bytes."""
    text, model = tmp_path / "text", tmp_path / "model"
    text.write_text("Nobody waits for the gradient of the weights. " * 8)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    return Settings(
        model, text, steps=STEPS, length=8, learning_rate=0.01, estimate=True, every=2,
        checkpoint=tmp_path / "run", history=tmp_path / "run.jsonl",
    )  # fmt: skip


def history(run: Settings) -> list[tuple[int, float]]:
    assert run.history is not None
    rows = map(json.loads, run.history.read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows]


def of_one_process(run: Settings) -> tuple[list[float], Any]:
    """Losses and weights of an ordinary loop."""
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate)
    windows = Windows(read_tokens(run.model, run.data), run.length, run.batch)
    losses = []
    for step in range(run.steps):
        ids, after = windows.of_step(step)
        loss = language_model.next_token_loss(model(ids), after)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.usefixtures("launched_on_ranks")
def test_it_trains_as_one_process_does_and_goes_on_over_another_number_of_ranks(
    run: Settings, on_ranks: Ranks
) -> None:
    options: list[object] = [run.model, "--data", run.data, "--length", 8, "--lr", 0.01]
    options += ["--estimate", "--steps", 2]
    options += ["--checkpoint", run.checkpoint, "--history", run.history]
    first = CliRunner().invoke(language_model.main, [*map(str, options)])
    assert first.exit_code == 0, first.output
    on_ranks(language_model.train, 1, (dataclasses.replace(run, ranks=1),), timeout=60)
    losses, weights = of_one_process(run)
    assert [step for step, _ in history(run)] == [1, 2, 3, 4]
    assert [loss for _, loss in history(run)] == pytest.approx(losses, rel=1e-5)
    assert run.checkpoint is not None
    result = read_checkpoint(run.checkpoint)
    for name, value in weights.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-5, msg=name)


def refused(run: Settings) -> str:
    try:
        language_model.train(run)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_run_of_another_text_does_not_go_on(run: Settings, on_ranks: Ranks) -> None:
    alone = dataclasses.replace(run, ranks=1, steps=1)
    on_ranks(language_model.train, 1, (alone,), timeout=60)
    run.data.write_text("something else, which is as long as it has to be for one window")
    (message,) = on_ranks(refused, 1, (alone,), timeout=60)
    assert "is of a run with another text" in message


def test_a_pass_has_every_window_once_and_the_next_in_another_order() -> None:
    windows = Windows(torch.arange(41), length=4, batch=2)
    passes = [[windows.of_step(5 * index + step)[0] for step in range(5)] for index in range(2)]
    starts = [torch.cat(epoch)[:, 0].tolist() for epoch in passes]
    assert [sorted(start) for start in starts] == [list(range(0, 40, 4))] * 2
    assert starts[0] != starts[1]
    inputs, targets = Windows(torch.arange(13), length=4, batch=5).of_step(1)
    assert torch.equal(targets, inputs + 1)


# --- a rank that is killed: torchrun's agent starts all again -------------------------------------


def rank(run: Settings) -> None:
    """Train; where the agent has started the ranks for the first time, one dies at a step."""
    os.environ["OMP_NUM_THREADS"] = "1"
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    of_step = Windows.of_step

    def dying(windows: Windows, step: int) -> Any:
        if first and os.environ["RANK"] == "1" and step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return of_step(windows, step)

    Windows.of_step = dying  # type: ignore[method-assign]
    with language_model.process_group():
        language_model.train(run)


def agent(run: Settings, servers: Servers, pipe: Connection) -> None:
    """What ``torchrun --nproc-per-node 2 --max-restarts 1`` does."""
    servers.join(ranks=True)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, start_method="forkserver",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="restarts", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, rank)(run)
    pipe.send("done")


def test_losses_are_those_of_a_run_that_nothing_happened_to(run: Settings, on_ranks: Ranks) -> None:
    plain = dataclasses.replace(run, checkpoint=None)
    whole, _ = on_ranks(language_model.train, 2, (plain,), timeout=60)
    assert run.history is not None
    run.history.unlink()
    ours, theirs = interpreters().Pipe(duplex=False)
    process = interpreters().Process(target=agent, args=(run, Servers.running(), theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(120), "the ranks that were started again do not end"
        assert ours.recv() == "done"
    finally:
        process.join(10)
        process.kill()
    engine = dict(history(run))  # of a step that was made twice the later
    assert [*engine] == [1, 2, 3, 4]
    assert [*engine.values()] == whole
