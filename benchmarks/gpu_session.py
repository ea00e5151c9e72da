"""Runs `benchmarks.gpu.session`."""

from benchmarks.gpu.session import main

if __name__ == "__main__":
    main()
