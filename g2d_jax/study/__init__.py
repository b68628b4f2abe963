"""The statistics of studies: errors, accuracy against compute, informativeness of rollouts, and the
bend of a learning curve."""
