"""What one run shares: settings, mesh, tokenizer, problems, rewards, policies, a trainer, and what it costs."""
