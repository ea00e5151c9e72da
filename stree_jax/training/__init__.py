"""Training and distillation of small models, from text files to a native checkpoint."""
