"""What needs a GPU: the session that checks and times everything, and the tuner of block sizes."""
