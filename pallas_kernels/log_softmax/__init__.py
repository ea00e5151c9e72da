"""Log-probabilities of rows of logits."""
