"""The gated delta rule over a tree and over a sequence, and the replay of an accepted path."""
