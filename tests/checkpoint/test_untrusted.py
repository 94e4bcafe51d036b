"""Nothing that a checkpoint contains is run, whoever wrote it."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from autosplit import CheckpointError
from autosplit.checkpoint import load_checkpoint, read_checkpoint
from tests.checkpoint import forms, test_damage
from tests.checkpoint.checkpoint_workers import named, trainer, whole


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.witness}",)


@pytest.fixture
def payload(tmp_path: Path) -> Any:
    built = Payload(tmp_path / "was-run")
    pickle.loads(pickle.dumps(built))
    assert built.witness.exists()  # it does run where it can
    built.witness.unlink()
    yield built
    assert not built.witness.exists()


def refused(path: Path, match: str) -> None:
    """By every way in."""
    test_damage.refused(path, match)
    with pytest.raises(CheckpointError, match=match):
        read_checkpoint(path)


def test_metadata_runs_nothing_beside_what_belongs_there(tmp_path: Path, payload: Payload) -> None:
    path = forms.own(tmp_path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    for protocol in (2, 4):
        metadata.planner_data = {**metadata.planner_data, "more": payload}
        (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        refused(path, r"the pickle names posix\.system")


@pytest.mark.parametrize(
    "call",
    [
        b"cposix\nsystem\n(S'touch %s'\ntR.",
        b'c__builtin__\neval\n(S\'__import__("os").system("touch %s")\'\ntR.',
        b"ctorch\nos\n(S'touch %s'\ntR.",
        b"ctorch.serialization\nload\n(S'%s'\ntR.",
        b"ctorch.hub\nload\n(S'%s'\ntR.",
        b"(S'touch %s'\niposix\nsystem\n.",
    ],
)
def test_metadata_can_name_nothing_else(call: bytes, payload: Payload, tmp_path: Path) -> None:
    content = call % str(payload.witness).encode() if b"%s" in call else call
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="the pickle names"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "what", [b"metadata\nMetadata\n", b"metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R"]
)
def test_metadata_cannot_change_torchs_classes(what: bytes, tmp_path: Path) -> None:
    """BUILD sets attributes of whatever is on the stack, classes and constants among them."""
    content = b"\x80\x02ctorch.distributed.checkpoint." + what + b"N}U\x05stateK\x01s\x86b."
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="the pickle would set attributes of a"):
        read_checkpoint(tmp_path)
    assert not hasattr(dcp.Metadata, "state")


def test_entries_that_are_no_tensors_run_nothing(tmp_path: Path, payload: Payload) -> None:
    """As torch's own reader would, of an optimizer's options in a folder by torch's own writer."""
    options = {f"param_groups.{name}.lr": payload for name, _ in whole(0).named_parameters()}
    path = forms.distributed(tmp_path, {"model": whole(0).state_dict(), "optimizer": options})
    with trainer(whole(1), 2, ranks=1) as engine:
        with pytest.raises(CheckpointError, match=r"lr in .* as tensors and plain values"):
            load_checkpoint(engine, path)
        assert torch.equal(named(engine)["1.0.bias"], whole(1)[1][0].bias)


def test_tensors_that_are_none_run_nothing(tmp_path: Path, payload: Payload) -> None:
    path = forms.distributed(tmp_path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    crafted = io.BytesIO()
    torch.save(payload, crafted)
    info = next(iter(metadata.storage_data.values()))
    info.offset, info.length = (path / "__0_0.distcp").stat().st_size, len(crafted.getvalue())
    with (path / "__0_0.distcp").open("ab") as file:
        file.write(crafted.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="as tensors and plain values; anything else is"):
        read_checkpoint(path)


def test_state_dicts_run_nothing(tmp_path: Path, payload: Payload) -> None:
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(payload))
    refused(tmp_path / "plain.pt", "cannot read .* as tensors and plain values")
    for content, new in (({**forms.state(), "more": payload}, True), (payload, False)):
        path = forms.one_file(tmp_path, content, _use_new_zipfile_serialization=new)
        refused(path, r"cannot read .*: UnpicklingError: [^\n]*GLOBAL posix[^\n]*blocked\.")


@pytest.mark.parametrize("way", ["../other.pt", "/{}/other.pt", "sub/../../other.pt", "..\\o.pt"])
def test_an_index_does_not_lead_out_of_its_folder(way: str, tmp_path: Path) -> None:
    torch.save(whole(0).state_dict(), tmp_path / "other.pt")
    folder = tmp_path / "it"
    folder.mkdir()
    index = {"weight_map": {name: way.format(tmp_path) for name in whole(0).state_dict()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "names a file outside its folder")


def test_an_index_names_files_only(tmp_path: Path) -> None:
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"0.weight": "."}}))
    with pytest.raises(CheckpointError, match="does not exist or is not a regular file"):
        read_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")  # opening it would wait for whoever writes
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"0.weight": "pipe.pt"}}))
    with pytest.raises(CheckpointError, match="does not exist or is not a regular file"):
        read_checkpoint(tmp_path)


def test_metadata_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    path = forms.distributed(tmp_path)
    shutil.move(path / "__0_0.distcp", tmp_path / "__0_0.distcp")
    metadata = dcp.FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../__0_0.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(path, r"names \.\./__0_0\.distcp, which is outside")


def test_numbers_that_take_all_memory_are_refused(tmp_path: Path) -> None:
    content = b"\x80\x04Nr\xff\xff\xff\x7f."  # the memo of the unpickler in C would be of 16 GiB
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        read_checkpoint(tmp_path)
