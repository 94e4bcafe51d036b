"""``python -m benchmarks.split`` measures and writes ``benchmarks/split/README.md``."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
