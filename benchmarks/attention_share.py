"""Runs `benchmarks.paper.attention_share`."""

from benchmarks.paper.attention_share import main

if __name__ == "__main__":
    main()
