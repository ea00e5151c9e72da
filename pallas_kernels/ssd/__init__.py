"""The chunked scan of a whole sequence, for prefill and training."""
