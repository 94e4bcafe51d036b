"""Checkpoints that are damaged at random are refused before anything is loaded, or load right."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.utils import _pytree as pytree

from autosplit.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from autosplit.errors import CheckpointError
from tests.checkpoint import forms
from tests.checkpoint.checkpoint_workers import named, train, trainer, whole
from tests.damage import damaged, looked_at

# Of old files, and of safetensors, not every damage can be noticed.
CHECKED = (forms.own, forms.distributed_wrapped, forms.one_file)


@st.composite
def one_damaged(draw: st.DrawFn, files: Mapping[Path, bytes]) -> dict[Path, bytes | None]:
    """One of the files, which is damaged, or gone, or a copy of another one."""
    file = draw(st.sampled_from(sorted(files)))
    remaining = st.sampled_from([None, *files.values()])
    return {file: draw(st.one_of(damaged(files[file]), damaged(files[file]), remaining))}


def values(state: Any) -> tuple[Any, ...]:
    """All that is there, of which damaged values may be no numbers."""
    leaves, spec = pytree.tree_flatten(state)
    plain = [leaf.nan_to_num().tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return spec, plain, [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [*CHECKED, forms.old_file, forms.indexed])
def test_damaged_checkpoints_are_refused_or_load_right(write: forms.Write, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with trainer(whole(1), 2, ranks=1) as engine:
        scheduler = StepLR(engine.optimizer, 2)

        def everything() -> Any:
            run = engine.optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()
            return copy.deepcopy((named(engine), run))

        train(engine, 0, 1)
        path = write(tmp_path)
        inputs: dict[str, Any] = {}
        if write is forms.own:
            inputs["scheduler"] = scheduler
            save_checkpoint(engine, path, scheduler=scheduler, step=7, extra={"seen": [1, 2, 3]})
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        sound = {file: file.read_bytes() for file in files}
        read_sound = read_checkpoint(path)
        load_checkpoint(engine, path, **inputs)
        right = everything()
        train(engine, 1, 2)
        save_checkpoint(engine, tmp_path / "other", scheduler=scheduler)
        load_checkpoint(engine, tmp_path / "other", scheduler=scheduler)
        earlier = everything()
        expected = values(right if inputs else (right[0], earlier[1]))

        changed: list[bool] = []

        def load(changes: dict[Path, bytes | None]) -> str:
            for file, content in (sound | changes).items():
                file.unlink(missing_ok=True)
                if content is not None:
                    file.write_bytes(content)
            if changed:  # a refused load changes nothing
                load_checkpoint(engine, tmp_path / "other", scheduler=scheduler)
                changed.clear()
            checked = write in CHECKED
            try:
                loaded = load_checkpoint(engine, path, **inputs)
            except CheckpointError:
                assert values(everything()) == values(earlier)
                message = "refused"
            else:
                changed.append(True)
                run = (loaded.step, loaded.extra) == (7, {"seen": [1, 2, 3]}) or not inputs
                assert not checked or (run and values(everything()) == expected)
                message = "loaded"
            try:
                read = read_checkpoint(path)
            except CheckpointError:
                return message
            # Which names a folder of torch's own has cannot be checked without a model.
            registered = {name: read_sound[name] for name in read if name in read_sound}
            assert not checked or values(registered) == values(
                {name: read[name] for name in registered}
            )
            return message

        text = looked_at(one_damaged(sound), 20, load)
    assert text["refused"] > 6
