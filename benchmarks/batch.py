"""Runs `benchmarks.paper.batch`."""

from benchmarks.paper.batch import main

if __name__ == "__main__":
    main()
