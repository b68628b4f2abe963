"""The responses of a stage: sampled or from elsewhere, scored, written, read back, and kept between
updates."""
