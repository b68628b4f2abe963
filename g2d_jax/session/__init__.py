"""The parts that the stages of a run share: settings, mesh, tokenizer, problems, rewards, policies,
trainer, costs."""
