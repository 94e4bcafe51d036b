"""A language model trained on a text: past a killed rank, over other ranks, as in one process."""

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
from torch.distributed.launcher.api import elastic_launch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from autosplit.checkpoint import read_checkpoint
from autosplit.errors import CheckpointError
from examples import language_model
from examples.language_model import Settings, Windows, read_tokens
from tests.interpreters import Servers, interpreters, torchrun_config
from tests.kept_ranks import Ranks

STEPS, KILLED = 4, 3  # counted from 1 and from 0; a checkpoint follows every second step


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A run over a folder with a tiny Llama and its weights, whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("run")
    text, model = folder / "text", folder / "model"
    text.write_text("Nobody waits for the gradient of the weights. " * 8)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    return Settings(
        model, text, steps=STEPS, length=8, learning_rate=0.01, estimate=True, every=2,
        checkpoint=folder / "run", history=folder / "run.jsonl",
    )  # fmt: skip


def options_of(run: Settings) -> list[str]:
    """The run on the command line."""
    options: list[object] = [run.model, "--data", run.data, "--length", run.length]
    options += ["--lr", run.learning_rate, "--steps", run.steps, "--every", run.every]
    options += ["--checkpoint", run.checkpoint, "--history", run.history, "--pp", run.ranks]
    return [*map(str, options), "--estimate"]


def history(run: Settings) -> dict[int, float]:
    """Losses by step; of a step that ran twice, the later."""
    assert run.history is not None
    rows = map(json.loads, run.history.read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def plain_training(run: Settings) -> tuple[dict[int, float], Any]:
    """Losses by step and weights of an ordinary loop in one process."""
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate)
    windows = Windows(read_tokens(run.model, run.data), run.length, run.batch)
    losses = {}
    for step in range(run.steps):
        ids, targets = windows.of_step(step)
        loss = language_model.next_token_loss(model(ids), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
    return losses, model.state_dict()


# --- a rank that is killed: torchrun's agent starts all again -------------------------------------


def rank(options: list[str]) -> None:
    """Train as one of torchrun's ranks; rank 1 dies once, at a step of the first start."""
    os.environ["OMP_NUM_THREADS"] = "1"
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    of_step = Windows.of_step

    def dying(windows: Windows, step: int) -> Any:
        if first and os.environ["RANK"] == "1" and step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return of_step(windows, step)

    Windows.of_step = dying  # type: ignore[method-assign]
    language_model.main.main(options, standalone_mode=False)


def agent(options: list[str], servers: Servers, pipe: Connection) -> None:
    """Do what ``torchrun --nproc-per-node 2 --max-restarts 1`` does."""
    servers.join(ranks=True)
    elastic_launch(torchrun_config("restarts", max_restarts=1), rank)(options)
    pipe.send("done")


@pytest.fixture(scope="module")
def restarted(run: Settings) -> Settings:
    """The run after two ranks trained it, of which one was killed and started again."""
    ours, theirs = interpreters().Pipe(duplex=False)
    arguments = options_of(run), Servers.running(), theirs
    process = interpreters().Process(target=agent, args=arguments)
    process.start()
    theirs.close()
    try:
        assert ours.poll(120), "the ranks that were started again do not end"
        assert ours.recv() == "done"
    finally:
        process.join(10)
        process.kill()
    return run


def test_a_killed_rank_changes_no_loss(restarted: Settings) -> None:
    losses, _ = plain_training(restarted)
    assert history(restarted) == pytest.approx(losses, rel=1e-5)


@pytest.mark.usefixtures("launched_on_ranks")
def test_another_number_of_ranks_trains_on_as_one_process_does(restarted: Settings) -> None:
    longer = dataclasses.replace(restarted, ranks=1, steps=STEPS + 1)
    result = CliRunner().invoke(language_model.main, options_of(longer))
    assert result.exit_code == 0, result.output
    losses, weights = plain_training(longer)
    assert history(longer) == pytest.approx(losses, rel=1e-5)
    assert longer.checkpoint is not None
    saved = read_checkpoint(longer.checkpoint)
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5, msg=name)


def refusal(run: Settings) -> str:
    try:
        language_model.train(run)
    except CheckpointError as error:
        return str(error)
    return ""


def test_another_text_is_refused(restarted: Settings, on_ranks: Ranks, tmp_path: Path) -> None:
    other = dataclasses.replace(restarted, ranks=1, data=tmp_path / "text")
    other.data.write_text("something else, which is as long as it has to be for one window")
    (message,) = on_ranks(refusal, 1, (other,), timeout=60)
    assert "is of a run with another text" in message


def test_a_pass_has_every_window_once_and_the_next_in_another_order() -> None:
    windows = Windows(torch.arange(41), length=4, batch=2)
    passes = [[windows.of_step(5 * index + step)[0] for step in range(5)] for index in range(2)]
    starts = [torch.cat(epoch)[:, 0].tolist() for epoch in passes]
    assert [sorted(start) for start in starts] == [list(range(0, 40, 4))] * 2
    assert starts[0] != starts[1]
    inputs, targets = Windows(torch.arange(13), length=4, batch=5).of_step(1)
    assert torch.equal(targets, inputs + 1)
