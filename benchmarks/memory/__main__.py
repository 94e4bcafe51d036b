"""``python -m benchmarks.memory`` measures and writes ``benchmarks/memory/README.md``."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
