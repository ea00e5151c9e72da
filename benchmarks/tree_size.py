"""Runs `benchmarks.paper.tree_size`."""

from benchmarks.paper.tree_size import main

if __name__ == "__main__":
    main()
