"""``python -m benchmarks.oracles`` freezes what autosplit gives, and compares it with another tree.

``freeze FOLDER`` writes a file a section, ``compare FOLDER`` works it out again and lists what
differs, ``compare FOLDER OTHER`` reads both. ``--tree`` takes autosplit from another checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from .differences import Cases, differences

SECTIONS = ("graphs", "schedules", "simulation", "moves", "searches", "plans")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("doing", choices=("freeze", "compare"))
    parser.add_argument("folders", nargs="+", type=Path, help="one, or two to compare")
    parser.add_argument("--sections", help=f"of {','.join(SECTIONS)}; all unless given")
    parser.add_argument("--skip", default="", help="cases that begin so, with commas between")
    parser.add_argument("--tree", type=Path, help="a checkout to take autosplit from")
    options = parser.parse_args()
    if options.tree is not None:
        sys.path.insert(0, str(options.tree))
    sections = options.sections.split(",") if options.sections else SECTIONS
    unknown = [each for each in sections if each not in SECTIONS]
    if unknown or len(options.folders) > (1 if options.doing == "freeze" else 2):
        parser.error(f"expected {options.doing}'s folders, and sections of {', '.join(SECTIONS)}")
    if options.doing == "freeze":
        for section in sections:
            cases = _made(section)
            options.folders[0].mkdir(parents=True, exist_ok=True)
            _file(options.folders[0], section).write_text(json.dumps(cases, indent=0))
            print(f"{section}: {len(cases)} cases of {_tree()}", flush=True)
        return
    skipped = tuple(filter(None, options.skip.split(",")))
    found = list(_compared(options.folders, sections, skipped))
    sys.exit(1 if any(found) else 0)


def _compared(
    folders: list[Path], sections: Sequence[str], skipped: tuple[str, ...]
) -> Iterator[bool]:
    """Whether each section differs, with how printed."""
    for section in sections:
        before = _read(folders[0], section)
        after = _read(folders[1], section) if len(folders) == 2 else _made(section)
        kept = (
            {name: case for name, case in cases.items() if not name.startswith(skipped or "\0")}
            for cases in (before, after)
        )
        lines = differences(*kept)
        print(f"{section}: {len(before)} cases, {len(lines)} differ", flush=True)
        for line in lines:
            print(f"  {line}")
        yield bool(lines)


def _file(folder: Path, section: str) -> Path:
    return folder / f"{section}.json"


def _read(folder: Path, section: str) -> Cases:
    found: Cases = json.loads(_file(folder, section).read_text())
    return found


def _tree() -> Path:
    """The checkout that is asked."""
    import autosplit

    return Path(autosplit.__file__).parent.parent


def _made(section: str) -> Cases:
    """Worked out with the tree at hand; read back, so that it compares with what was written."""
    cases = dict(import_module(f".{section}", __package__).cases())
    read: Cases = json.loads(json.dumps(cases))
    return read


if __name__ == "__main__":
    main()
