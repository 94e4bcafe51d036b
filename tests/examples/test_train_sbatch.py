"""The launcher script for Slurm: torchrun and the program accept what it passes to them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from torch.distributed.run import parse_args

from examples import language_model

SCRIPT = Path(language_model.__file__).with_name("train.sbatch")
COMMANDS = {
    "scontrol": 'test "$*" = "show hostnames node[3-4]"; echo node3; sleep 0.1; echo node4',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "torchrun": 'printf "%s\\n" "$OMP_NUM_THREADS" "$@"',
}
JOB = {
    "SLURM_JOB_NODELIST": "node[3-4]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_ID": "17",
    "SLURM_CPUS_PER_TASK": "16",
    "RANKS_PER_NODE": "4",
}


def test_each_node_starts_torchrun(tmp_path: Path) -> None:
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nset -e\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "config.json").touch()
    arguments = [str(tmp_path), "--data", str(tmp_path / "config.json"), "--every", "100"]
    environment = os.environ | JOB | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    output = subprocess.run(
        ["bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    threads, *options = output.stdout.splitlines()
    assert threads == "4"
    parsed = parse_args(options)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_id) == ("2", "4", "17")
    assert parsed.rdzv_endpoint == "node3:29400"
    assert (parsed.module, parsed.training_script) == (True, "examples.language_model")
    context = language_model.main.make_context("main", list(parsed.training_script_args))
    assert (context.params["every"], context.params["ranks"]) == (100, 8)
