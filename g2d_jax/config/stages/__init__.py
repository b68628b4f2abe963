"""The kinds of stages, a file each: the fields of its settings, what it reads, and what does not go
together."""
