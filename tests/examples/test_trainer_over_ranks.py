"""transformers' Trainer over two ranks: its logs and files as those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from autosplit.checkpoint import read_checkpoint
from autosplit.pipeline import StageOptions
from examples import trainer_over_ranks
from examples.transformers_trainer import Windows, build
from tests.kept_ranks import Ranks

pytestmark = pytest.mark.filterwarnings("default")  # accelerate and torch have notes for each other

OPTIONS: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True}
KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "step")


def model_without_dropout(*, adapted: bool = False) -> nn.Module:
    model: nn.Module = build()
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0
    if not adapted:
        return model
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))  # type: ignore[arg-type]


def logged(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: row[key] for key in KEYS if key in row} for row in rows]


def in_one_process(folder: Path) -> list[dict[str, float]]:
    trainer = Trainer(
        model=model_without_dropout(),
        args=TrainingArguments(
            str(folder), max_steps=4, per_device_train_batch_size=4, per_device_eval_batch_size=4,
            max_grad_norm=0.5, learning_rate=1e-2, weight_decay=0.1, logging_steps=1, save_steps=2,
            report_to=[], **OPTIONS,
        ),
        train_dataset=Windows(32, 16, seed=0),
        eval_dataset=Windows(8, 16, seed=1),
        compute_metrics=trainer_over_ranks.accuracy,
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


def on_a_rank(folder: str) -> tuple[list[dict[str, float]], list[dict[str, float]], int]:
    run = f"{folder}/ranks"
    pipeline = {"stage_options": StageOptions(planning={"costs": "estimate"})}
    options = {"pipeline": pipeline, **OPTIONS}
    logs = trainer_over_ranks.main(run, model=model_without_dropout(), **options)
    half = f"{run}/checkpoint-2"
    model = model_without_dropout()
    resumed = trainer_over_ranks.main(f"{folder}/again", model=model, resume=half, **options)
    model = model_without_dropout(adapted=True)
    trainer_over_ranks.main(f"{folder}/adapted", model=model, **options)
    return logs, resumed, sum(p.requires_grad for p in model.parameters())


def test_logs_files_and_adapters(on_ranks: Ranks, tmp_path: Path) -> None:
    """Resumed from the middle too, on both ranks the same; a checkpoint is read by transformers."""
    expected = logged(in_one_process(tmp_path / "one"))
    for logs, resumed, _ in on_ranks(on_a_rank, 2, (str(tmp_path),), timeout=300):
        for rows in (logged(logs), logged(resumed)):
            assert len(rows) == len(expected)
            for row, other in zip(rows, expected, strict=True):
                assert row == pytest.approx(other, rel=1e-4)
    last = tmp_path / "ranks" / "checkpoint-4"
    loaded = LlamaForCausalLM.from_pretrained(last)
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "one" / "checkpoint-4")
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-4)
    assert not (tmp_path / "ranks" / "checkpoint-4" / "optimizer.pt").exists()
    weights = read_checkpoint(tmp_path / "adapted" / "checkpoint-4" / "pipeline")
    model: Any = model_without_dropout(adapted=True)
    assert isinstance(model, PeftModel)
    adapters = {name: value for name, value in weights.items() if "lora_" in name}
    set_peft_model_state_dict(model, {n.replace(".default", ""): v for n, v in adapters.items()})
    changed = model.state_dict()
    assert any(value.any() for name, value in adapters.items() if "lora_B" in name)  # trained
    assert all(torch.equal(changed[name], value) for name, value in adapters.items())
