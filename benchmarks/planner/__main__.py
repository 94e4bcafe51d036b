"""``python -m benchmarks.planner`` measures and writes ``benchmarks/planner/README.md``."""

from .page import PAGE

if __name__ == "__main__":
    PAGE.main()
