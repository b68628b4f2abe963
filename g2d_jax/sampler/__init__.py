"""Sampling of responses: a schedule of rows, jitted programs over the whole mesh, and the engine
that drives them."""
