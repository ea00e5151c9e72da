"""Training and distillation of the small models: text in, native checkpoint out."""
