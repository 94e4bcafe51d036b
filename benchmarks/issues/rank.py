"""One rank of one side of a case: ``python -m benchmarks.issues.rank CASE SIDE FILE``.

The ranks of stock torch import nothing of autosplit.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from .case import FAILS, RIGHT, Absent, SymptomError
from .cases import CASES

# A rank whose peers are gone shall not end before the judge does.
_TIMEOUT = timedelta(seconds=600)


def main() -> None:
    name, side, file = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    run = CASES[name].stock if side == "stock" else CASES[name].ours
    if isinstance(run, Absent):
        raise TypeError(f"{name} has nothing to run on the side {side!r}")
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    symptom = False
    try:
        state, text = RIGHT, run()
    except SymptomError as seen:
        state, text, symptom = FAILS, str(seen), True
    except BaseException as error:
        state, text = FAILS, first_line(error)
    found = {"state": state, "text": text, "symptom": symptom, "at": time.time()}
    draft = pathlib.Path(file).with_suffix(".draft")
    draft.write_text(json.dumps(found))
    draft.rename(file)
    # Not an ordinary end, in which a rank may wait for others that fail.
    sys.stdout.flush()
    os._exit(0)


def first_line(error: BaseException) -> str:
    """Of the error that was there first, if it says anything: pipelines raise others about it."""
    found, seen = error, set()
    while (cause := error.__cause__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        error = cause
        found = error if str(error).strip() else found
    lines = [line.strip() for line in str(found).splitlines() if line.strip()]
    return f"{type(found).__name__}: {lines[0] if lines else ''}"


if __name__ == "__main__":
    main()
