"""The arithmetic of studies: errors, frontiers, ratings, what rollouts can teach, when a warm-up has been enough."""
