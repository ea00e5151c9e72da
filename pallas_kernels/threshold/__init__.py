"""Where to cut a distribution: the search behind top-k and top-p."""
