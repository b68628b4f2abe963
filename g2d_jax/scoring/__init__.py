"""Scalar rewards from models: conversations rendered in the reward model's own form, and scored in
batches."""
