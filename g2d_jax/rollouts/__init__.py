"""The responses of a stage: sampled or from other tools, scored, written, read back, and kept
between updates."""
