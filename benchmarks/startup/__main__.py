"""``python -m benchmarks.startup`` measures and writes ``benchmarks/startup/README.md``."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
