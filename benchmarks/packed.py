"""Runs `benchmarks.paper.packed`."""

from benchmarks.paper.packed import main

if __name__ == "__main__":
    main()
