"""The kinds of stages, one file each: its settings, its inputs, and its conflicts."""
