"""``python -m benchmarks.paper`` measures and writes ``benchmarks/paper/README.md``."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
