"""What is between two layers: the residual stream and the norm before the next."""
