"""The best next token, without the logits of all others."""
