"""The arithmetic of studies: errors, frontiers, what rollouts can teach, when a warm-up has been
enough."""
