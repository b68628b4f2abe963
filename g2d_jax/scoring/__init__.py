"""Scalar rewards from models: conversations in the reward model's own template, scored in
batches."""
