"""Runs `benchmarks.paper.temperature`."""

from benchmarks.paper.temperature import main

if __name__ == "__main__":
    main()
