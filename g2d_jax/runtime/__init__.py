"""What a run stands on: processes, locks, files, metrics, compiled programs. Nothing here knows what is trained."""
