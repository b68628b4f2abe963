"""One decoder for Qwen2, Qwen3 and Llama, and its weights from and to Hugging Face files."""
