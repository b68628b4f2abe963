"""The foundation of a run: processes, locks, files, metrics, compiled programs. Nothing here
depends on the training."""
