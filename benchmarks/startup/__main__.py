"""``python -m benchmarks.startup`` measures and writes ``benchmarks/startup/README.md``."""

import compileall

import autosplit
from autosplit import passes

from .page import PAGE

if __name__ == "__main__":
    for package in (autosplit, passes):  # passes is a symbolic link, which is not followed
        compileall.compile_dir(package.__path__[0], quiet=1)
    PAGE.main()
