"""Build the wheel and the sdist, look into them, and import the wheel from an empty directory.

``autosplit/passes`` is a symlink to ``passes/``; this proves that it is packaged as real files
under ``autosplit.passes`` and that no top-level ``passes`` is installed.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
WANTED = (
    "autosplit/passes/manager.py",
    "autosplit/pipeline/builders/families.py",
    "autosplit/py.typed",
)
PROBE = """
import pathlib, sys
import autosplit, autosplit.passes, autosplit.cli
for module in (autosplit, autosplit.passes, autosplit.cli):
    where = pathlib.Path(module.__file__)
    if not where.is_relative_to(sys.argv[1]):
        sys.exit(f"{module.__name__} came from {where}, not from the wheel")
heavy = {"matplotlib", "transformers", "torch.distributed.pipelining"} & set(sys.modules)
if heavy:
    sys.exit(f"importing autosplit imported {sorted(heavy)}")
print("wheel imports from an empty directory:", autosplit.__version__)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        run(sys.executable, "-m", "build", "--outdir", str(out), str(ROOT))
        (wheel,) = out.glob("*.whl")
        (sdist,) = out.glob("*.tar.gz")
        check_names(wheel.name, zipfile.ZipFile(wheel).namelist())
        prefix = sdist.name.removesuffix(".tar.gz") + "/"
        with tarfile.open(sdist) as archive:
            names = [name.removeprefix(prefix) for name in archive.getnames()]
        check_names(sdist.name, names)
        site, empty = out / "site", out / "empty"
        empty.mkdir()
        run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", str(site), str(wheel))
        code = f"import sys; sys.path.insert(0, {str(site)!r})\n{PROBE}"
        subprocess.run([sys.executable, "-c", code, str(site)], cwd=empty, check=True)


def check_names(archive: str, names: list[str]) -> None:
    missing = [name for name in WANTED if name not in names]
    stray = [name for name in names if name.startswith("passes/") and archive.endswith(".whl")]
    if missing or stray:
        sys.exit(f"{archive}: missing {missing}, stray {stray[:3]}")


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout}\n{result.stderr}")


if __name__ == "__main__":
    main()
