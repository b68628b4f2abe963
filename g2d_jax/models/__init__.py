"""One decoder for all model families, and its weights from and to Hugging Face files."""
