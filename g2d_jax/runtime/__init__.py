"""The ground of a run: processes, locks, files, metrics, compiled programs. Nothing here knows what
is trained."""
