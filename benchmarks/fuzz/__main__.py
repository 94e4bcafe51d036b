"""``python -m benchmarks.fuzz``: damage files, judge what is read of them, write the page."""

from __future__ import annotations

import argparse
import pathlib
import sys

from ..command import parse
from ..environment import describe
from ..results import Results, table
from .judge import LIMIT, Verdict
from .subjects import SUBJECTS
from .sweep import sweep

FOLDER = pathlib.Path(__file__).parent
EXAMPLES = 3000

_PAGE = """\
# Damaged files

Written by `python -m benchmarks.fuzz`. Sound files of schedules (CSV, as torch's) and plans (JSON)
are damaged by hypothesis: bytes, cells, lines and values are deleted, repeated, exchanged, cut off,
or replaced by what a slip of the hand, another program or an attacker might put there. Each is then
either read, and compared by other means with what the file says (the same actions in the same
order, every one that is needed once, simulated to its end, the same when written again; for a plan,
its model cut into its stages), or refused with a typed error. Everything else is a failure: another
error, something else read than the file says, or more than {limit:g} seconds.

{table}

{environment}
"""


def main() -> int:
    """Run the parts, and say 1 if a file was not treated right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, SUBJECTS, "kind")
    results = Results.read(FOLDER / "results.json")
    command = f"python -m benchmarks.fuzz --examples {options.examples} --seed {options.seed}"
    failed = False
    for name in options.kinds or SUBJECTS:
        found = sweep(SUBJECTS[name](), options.examples, seed=options.seed)
        counts = {each.value: found.verdicts[each] for each in Verdict}
        print(f"{name}: {counts} {found.failure}", flush=True)
        failed = failed or bool(found.failure)
        row = {"name": name, **counts, "failure": found.failure}
        results.update("files", [row], command, describe(1))
    (FOLDER / "README.md").write_text(page(results))
    return int(failed)


def page(results: Results) -> str:
    """The page, of the rows that there are."""
    kinds = [each.value for each in Verdict]
    rows = [[row["name"], *(f"{row[kind]:,}" for kind in kinds)] for row in results.rows("files")]
    part = results.parts["files"]
    environment = f"Run with `{part['commands'][-1]}` on {part['environment']}."
    text = table(["files", *kinds], rows)
    return _PAGE.format(limit=LIMIT, table=text, environment=environment)


if __name__ == "__main__":
    sys.exit(main())
