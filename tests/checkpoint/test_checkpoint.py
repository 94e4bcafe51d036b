"""Checkpoints of the whole model go into any number of stages and back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from autosplit import CheckpointError
from autosplit.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from autosplit.checkpoint.saving import without_single_process_warning
from autosplit.planner.meta_model import initial_values, meta_model
from tests.checkpoint import checkpoint_workers, forms
from tests.checkpoint.checkpoint_workers import adam, named, train, trainer, whole
from tests.checkpoint.forms import distributed, state
from tests.pipeline.workers import equal

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.mark.parametrize("save", forms.OTHERS)
def test_every_format_loads_into_stages(save: Any, tmp_path: Path) -> None:
    path = save(tmp_path)
    expected = whole(3).state_dict()
    read = read_checkpoint(path)
    assert read.keys() == state().keys()
    assert all(torch.equal(value, expected[name]) for name, value in read.items())
    with trainer(whole(1), 3, ranks=1) as engine:
        assert load_checkpoint(engine, path).missing_keys == []
        assert named(engine).keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in named(engine).items())


@pytest.mark.parametrize("save", [forms.one_file, forms.indexed, forms.distributed])
def test_a_skeleton_takes_up_the_checkpoints_values(save: Any, tmp_path: Path) -> None:
    model = meta_model(whole)
    with trainer(model, 3, ranks=1, values=partial(initial_values, model)) as engine:
        load_checkpoint(engine, save(tmp_path))
        expected = whole(3).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in named(engine).items())
        assert torch.isfinite(engine.step(checkpoint_workers.batch(0))).all()
    assert all(parameter.is_meta for parameter in model.parameters())


def plain(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = whole(seed)
    return model, adam(list(model.parameters()))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Run a step as the trainer does, microbatch after microbatch."""
    inputs, targets = checkpoint_workers.batch(step)
    for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        (torch.nn.functional.cross_entropy(model(x), y) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_that_is_not_cut_takes_it_up_with_torchs_own_functions(tmp_path: Path) -> None:
    with trainer(whole(0), 3, ranks=1) as engine:
        train(engine, 0, 2)
        save_checkpoint(engine, tmp_path)
        train(engine, 2, 4)
        expected = named(engine)
    model, optimizer = plain(5)
    model.load_state_dict(read_checkpoint(tmp_path))
    plain_step(model, optimizer, 0)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    with without_single_process_warning():
        results = {"model": model.state_dict(), "optimizer": flat}
        dcp.load(results, checkpoint_id=tmp_path, no_dist=True)
    model.load_state_dict(results["model"])
    set_optimizer_state_dict(model, optimizer, flat, options=FLAT)
    for step in (2, 3):
        plain_step(model, optimizer, step)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name])


def test_stages_take_up_what_torchs_own_functions_saved(tmp_path: Path) -> None:
    model, optimizer = plain(0)
    plain_step(model, optimizer, 0)
    saved = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    path = distributed(tmp_path, saved)
    plain_step(model, optimizer, 1)
    with trainer(whole(4), 2, ranks=1) as engine:
        load_checkpoint(engine, path, optimizer=True)
        train(engine, 1, 2)
        for name, value in named(engine).items():
            torch.testing.assert_close(value, model.state_dict()[name])


def changed(path: Path, values: dict[str, Tensor | None]) -> Path:
    return forms.one_file(path, {n: v for n, v in {**state(), **values}.items() if v is not None})


def test_strict_is_for_missing_and_extra_only(tmp_path: Path) -> None:
    path = changed(tmp_path, {"1.0.bias": None, "nose": torch.zeros(1)})
    with trainer(whole(1), 2, ranks=1) as engine:
        with pytest.raises(CheckpointError, match=r"1\.0\.bias.*\n.*nose.*\nstrict=False"):
            load_checkpoint(engine, path)
        result = load_checkpoint(engine, path, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["1.0.bias"], ["nose"])
        assert torch.equal(named(engine)["1.0.bias"], whole(1)[1][0].bias)
        assert torch.equal(named(engine)["1.0.weight"], state()["1.0.weight"])
        path = changed(tmp_path, {"1.0.bias": torch.zeros(2)})
        with pytest.raises(CheckpointError, match=r"1\.0\.bias: expected \[8\], got \[2\]\nMore: "):
            load_checkpoint(engine, path, strict=False)


def test_the_optimizer_is_left_out_on_demand(tmp_path: Path) -> None:
    with trainer(whole(0), 2, ranks=1) as engine:
        train(engine, 0, 1)
        save_checkpoint(engine, tmp_path / "new")
    with trainer(whole(0), 2, ranks=1) as engine:
        load_checkpoint(engine, tmp_path / "new", optimizer=False)
        assert not engine.optimizer.state
        load_checkpoint(engine, tmp_path / "new")
        assert engine.optimizer.state
        with pytest.raises(CheckpointError, match="no optimizer state"):
            load_checkpoint(engine, forms.one_file(tmp_path), optimizer=True)


def one_rate(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def saved(folder: Path, build: Callable[[Any], torch.optim.Optimizer]) -> Tensor:
    """A checkpoint behind one step, and the loss of the next."""
    with trainer(whole(0), 2, ranks=1, optimizer_fn=build) as engine:
        train(engine, 0, 1)
        save_checkpoint(engine, folder)
        return train(engine, 1, 2)


def test_a_group_of_an_optimizer_may_have_no_parameters(tmp_path: Path) -> None:
    """As of a stage without biases, where groups are made by kind."""

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": []}, {"params": parameters}])

    expected = saved(tmp_path, build)
    with trainer(whole(1), 3, ranks=1, optimizer_fn=build) as engine:
        load_checkpoint(engine, tmp_path, optimizer=True)
        assert torch.equal(train(engine, 1, 2), expected)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    frozen = whole(0)
    frozen[1].requires_grad_(False)
    with trainer(frozen, 2, ranks=1) as engine:
        train(engine, 0, 1)
        save_checkpoint(engine, tmp_path)
    with (
        trainer(whole(0), 2, ranks=1) as engine,
        pytest.raises(CheckpointError, match=r"no optimizer state for 1\.0\.bias, 1\.0\.weight"),
    ):
        load_checkpoint(engine, tmp_path)
    frozen = whole(0)
    frozen[1].requires_grad_(False)
    with (
        trainer(frozen, 2, ranks=1, optimizer_fn=one_rate) as engine,
        pytest.raises(CheckpointError, match=r"in one group.*differ in lr"),
    ):
        load_checkpoint(engine, tmp_path)


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.2),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.2, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.2),
}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("then", ["adamw", "sgd"])
def test_another_kind_of_optimizer_is_refused(then: str, scheduled: bool, tmp_path: Path) -> None:
    """Before anything is loaded; Adam is of AdamW's kind, with names added by schedulers or not."""
    optimizers = {"adamw": one_rate, **OPTIMIZERS}
    with trainer(whole(0), 2, ranks=1, optimizer_fn=optimizers[then]) as engine:
        if scheduled:
            torch.optim.lr_scheduler.OneCycleLR(engine.optimizer, 0.1, total_steps=9)
        train(engine, 0, 2)
        save_checkpoint(engine, tmp_path)
    alike = {"adamw", "adam", "amsgrad"} if then == "adamw" else {then}
    for kind, build in optimizers.items():
        with trainer(whole(1), 2, ranks=1, optimizer_fn=build) as engine:
            earlier = named(engine)
            if kind in alike:
                load_checkpoint(engine, tmp_path, optimizer=True)
            else:
                message = (
                    "of another kind of optimizer: .* are not options of .* or optimizer=False"
                )
                with pytest.raises(CheckpointError, match=message):
                    load_checkpoint(engine, tmp_path)
                assert equal(named(engine), earlier)
                assert engine.optimizer.param_groups[0]["lr"] in (1e-2, 0.2)
                load_checkpoint(engine, tmp_path, optimizer=False)
            train(engine, 2, 3)


def test_other_versions_of_torch_have_more_options_or_fewer(tmp_path: Path) -> None:
    class Newer(torch.optim.AdamW):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            self.defaults["new"] = 1
            for group in self.param_groups:
                group["new"] = 1

    for one, other in ((Newer, torch.optim.AdamW), (torch.optim.AdamW, Newer)):
        expected = saved(tmp_path, one)
        with trainer(whole(1), 2, ranks=1, optimizer_fn=other) as engine:
            load_checkpoint(engine, tmp_path, optimizer=True)
            assert torch.equal(train(engine, 1, 2), expected)


def test_groups_of_an_optimizer_do_not_take_the_options_of_one(tmp_path: Path) -> None:
    def in_more(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [parameter]} for parameter in parameters], lr=0.5)

    expected = saved(tmp_path, one_rate)
    with trainer(whole(1), 2, ranks=1) as engine:
        with pytest.raises(CheckpointError, match=r"shares an optimizer group.*optimizer=False"):
            load_checkpoint(engine, tmp_path)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-2, 3e-2]
    with trainer(whole(1), 2, ranks=1, optimizer_fn=in_more) as engine:  # nothing is lost
        load_checkpoint(engine, tmp_path)
        assert torch.equal(train(engine, 1, 2), expected)


def file_with_optimizer(folder: Path) -> Path:
    model, optimizer = plain(3)
    plain_step(model, optimizer, 0)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    return forms.one_file(folder, content)


def file_of_lightning(folder: Path) -> Path:
    model, optimizer = plain(3)
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    return forms.one_file(folder, state)


def folder_with_optim(folder: Path) -> Path:
    model, optimizer = plain(3)
    plain_step(model, optimizer, 0)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return distributed(folder, {"model": model.state_dict(), "optim": flat})


@pytest.mark.parametrize("write", [file_with_optimizer, file_of_lightning, folder_with_optim])
def test_the_state_of_an_optimizer_is_not_left_out_silently(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path)
    with trainer(whole(1), 2, ranks=1) as engine:
        earlier = named(engine)
        for inputs in (None, True):
            with pytest.raises(CheckpointError, match=r"no optimizer state for .*optimizer=False"):
                load_checkpoint(engine, path, optimizer=inputs)
        assert equal(named(engine), earlier)
        load_checkpoint(engine, path, optimizer=False)
        assert equal(named(engine), read_checkpoint(path))


def test_stages_that_were_not_cut_from_one_model_need_names(tmp_path: Path) -> None:
    from autosplit.trainer.trainer import PipelineTrainer

    def build(count: int) -> PipelineTrainer:
        modules = [nn.Linear(3, 3) for _ in range(count)]
        loss = torch.nn.functional.mse_loss
        return PipelineTrainer(modules, loss, adam, microbatches=1, ranks=1)

    with build(2) as one, build(2) as two:
        with pytest.raises(CheckpointError, match="'weight' is one parameter in stage 0"):
            save_checkpoint(one, tmp_path)
        save_checkpoint(one, tmp_path, names=lambda stage, name: f"layers.{stage}.{name}")
        assert "layers.1.bias" in read_checkpoint(tmp_path)
        load_checkpoint(two, tmp_path, names=lambda stage, name: f"layers.{stage}.{name}")
        assert torch.equal(one.modules[1].weight, two.modules[1].weight)


def test_a_model_in_one_process_is_told_how(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    advice = r"takes a PipelineTrainer, got a Sequential: a model .*read_checkpoint\(path\)"
    with pytest.raises(CheckpointError, match=advice):
        load_checkpoint(model, tmp_path / "a.pt")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=advice):
        save_checkpoint(model, tmp_path / "a.pt")  # type: ignore[arg-type]
    torch.save(model.state_dict(), tmp_path / "a.pt")
    model.load_state_dict(read_checkpoint(tmp_path / "a.pt"))


def test_paths_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        read_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="File name too long"):
        read_checkpoint(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match=r"expected in .* there is nothing"):
        read_checkpoint(tmp_path)
    (tmp_path / "x.pt").write_text("no")
    (tmp_path / "x.safetensors").write_text("no")
    (tmp_path / "x.index.json").write_text("{}")
    torch.save([1], tmp_path / "list.pt")
    for name, message in {
        "x.pt": "cannot read",
        "x.safetensors": "cannot read",
        "list.pt": "it has a list",
        "": "its JSON has no weight_map",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(tmp_path / name)
    (tmp_path / ".metadata").write_text("no")
    with pytest.raises(CheckpointError, match=r"cannot read .*\.metadata"):
        read_checkpoint(tmp_path)
