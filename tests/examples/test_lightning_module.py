"""Lightning with a split model: weights and metrics as without it, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("pytorch_lightning")

from examples import lightning_module

pytestmark = pytest.mark.filterwarnings("default")  # Lightning and torch have notes for each other


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fit(tmp_path: Path, precision: str) -> None:
    options = {
        "precision": precision,
        "default_root_dir": tmp_path,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plain = lightning_module.main(split=False, **options)
    split = lightning_module.main(**options)
    assert split.model.functions
    expected = plain.state_dict()
    assert expected.keys() == split.state_dict().keys()
    for name, value in split.state_dict().items():
        assert torch.equal(value, expected[name]), name
    metrics = [network.trainer.callback_metrics for network in (plain, split)]
    assert metrics[0] == metrics[1]
    assert set(metrics[0]) == {"loss", "held_out"}
    (file, *_) = tmp_path.rglob("*.ckpt")
    saved = torch.load(file, weights_only=False)["state_dict"]
    assert saved.keys() == expected.keys()
