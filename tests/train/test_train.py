"""``autosplit train``, as a person uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import autosplit.train.run  # launches ranks, and is imported late otherwise
from autosplit.checkpoint import read_checkpoint
from autosplit.cli import main
from autosplit.train.preparation import TextWindows, read_tokens
from tests.ranks import Ranks
from tests.train.test_language_model import saved, tiny
from tests.train.workers import differing

pytestmark = pytest.mark.usefixtures("launched_on_ranks")

TEXT = "The quick brown fox jumps over the lazy dog, and nobody waits for its weights.\n" * 4


@pytest.fixture(autouse=True)
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text"
    file.write_text(TEXT)
    return file


def run(model: object, text: Path, *options: object) -> Result:
    arguments = ["train", str(model), "--data", str(text), "--length", "8", *map(str, options)]
    return CliRunner().invoke(main, arguments)


def of_one_process(folder: Path, text: Path, steps: int) -> tuple[list[float], Any]:
    """Losses and weights of an ordinary loop."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    windows = TextWindows(read_tokens(text, None), 8, 4)
    losses = []
    for step in range(steps):
        inputs, targets = windows.of_step(step)
        each = []
        for ids, after in zip(inputs, targets, strict=True):
            logits = model(ids[None]).logits
            each.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), after))
            (each[-1] / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(each).mean().item())
    return losses, model.state_dict()


def test_a_folder_is_trained_and_goes_on_over_another_number_of_ranks(
    tmp_path: Path, text: Path
) -> None:
    """The weights that are there are where it begins; all is as in one process."""
    torch.manual_seed(0)
    folder, checkpoint, log = tmp_path / "model", tmp_path / "run", tmp_path / "log.jsonl"
    LlamaForCausalLM(tiny(num_hidden_layers=1)).save_pretrained(folder)
    options = ("--lr", 0.01, "--estimate", "--checkpoint", checkpoint, "--history", log)
    options = (*options, "--microbatches", 4, "--every", 1)
    first = run(folder, text, *options, "--steps", 2)
    assert first.exit_code == 0, first.output
    for word in (
        "first block",
        "planned",
        "by FLOPs and bytes (--estimate)",
        "measured",
        "bubble",
        "memory, rank 1",
        "at step 2",
    ):
        assert word in first.output

    with log.open("a") as file:
        file.write('{"step": 3, "loss": 0}\n')  # of a run that was killed before it saved
    again = run(folder, text, *options, "--steps", 4)
    assert again.exit_code == 1
    assert "which this run would replace: --resume goes on from it" in again.output
    other = run(folder, text, *options, "--steps", 4, "--resume", "--batch", 8)
    assert "of a run with another --batch, so that" in other.output
    assert "windows: --batch 4" in other.output

    second = run(folder, text, *options, "--steps", 4, "--resume", "--pp", 1)
    assert second.exit_code == 0, second.output
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses, weights = of_one_process(folder, text, 4)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-6)
    assert [len(row["memory"] or ()) for row in rows] == [0, 2, 0, 1]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(32 / row["seconds"])
        assert 0.0 <= row["bubble"] < 1.0
    found = read_checkpoint(checkpoint)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
    done = run(folder, text, *options, "--steps", 4, "--resume", "--pp", 1)
    assert "is of step 4, and the run ends at step 4: --steps 5 or more" in done.output


def test_a_function_is_trained_under_a_limit_from_initial_values(text: Path) -> None:
    result = run("tests.train.models:causal", text, "--estimate", "--memory-limit", "1GiB")
    assert result.exit_code == 0, result.output
    assert "at step 9; 288 tokens" in result.output  # one pass through the text


def test_dropout_is_drawn_by_the_seed(tmp_path: Path, text: Path) -> None:
    def losses(seed: int) -> list[float]:
        log = tmp_path / "log.jsonl"
        log.unlink(missing_ok=True)
        options = ("--estimate", "--pp", 1, "--steps", 2, "--seed", seed, "--history", log)
        result = run("tests.train.models:dropping", text, *options)
        assert result.exit_code == 0, result.output
        return [json.loads(line)["loss"] for line in log.read_text().splitlines()]

    first = losses(3)
    assert losses(3) == first != losses(4)


def test_more_stages_than_blocks_are_refused_by_one_process(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(autosplit.train.run, "launch")
    result = run("tests.train.models:causal", text, "--pp", 300)
    assert result.exit_code == 1
    assert "has blocks for 1 to " in result.output


def test_what_ranks_find_is_one_message(tmp_path: Path, text: Path) -> None:
    result = run(saved(tiny(vocab_size=100), tmp_path / "model"), text)
    assert result.output.startswith(
        "Error: PipelineError: bytes (there is no tokenizer) gave token"
    )
    assert "Traceback" not in result.output


def test_ranks_that_disagree_say_so_on_all(tmp_path: Path, on_ranks: Ranks) -> None:
    (tmp_path / "other").write_text(TEXT.upper())
    found = on_ranks(differing, 2, (str(tmp_path),), timeout=60)
    assert found[0] == found[1]
    *others, nothing = found[0]
    assert len(others) == 3
    assert {each.partition(" than ")[0] for each in others} == {
        "rank 1 has another model, text, checkpoint or options"
    }
    assert nothing.startswith("rank 1: cannot read the text")


def test_another_world_than_torchrun_started(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    result = run("tests.train.models:causal", text)
    assert "torchrun started 3 processes, and --pp 2 is for 2: say --pp 3" in result.output


def test_where_no_terminal_shows_a_bar_steps_are_told_in_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with autosplit.train.run.StepLog(None, 0, 3, speaks=True) as log:
        for step in (1, 2):
            log.tell(autosplit.train.run.StepRecord(step, 2.5, 1.0, 0.1, 80.0, 0.25))
    told = "step 1 of 3: loss 2.5000, 80 tokens/s, bubble 25%\n"  # the next is due in 30 s
    assert capsys.readouterr().err == told
