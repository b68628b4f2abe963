"""Training: the optimiser, the train step and checkpoints."""
