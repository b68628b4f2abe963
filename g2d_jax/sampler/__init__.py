"""Sampling of responses: a schedule of rows, jitted programs over the whole mesh, and the engine
that drives them."""

COUNTS = ("responses", "without_logprobs", "tokenised_again", "other_ids")
"""Counts of a server's responses. tokenised_again: it gives no ids. other_ids: of these, where the
ids are not those of the text, or not as many as the server says that it drew."""
