"""Runs `benchmarks.gpu.tune`."""

from benchmarks.gpu.tune import main

if __name__ == "__main__":
    main()
