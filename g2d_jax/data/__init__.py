"""Data: problems and examples (rows ► fields ► filters ► collect), their splits, the order they are
drawn in (loader, curriculum), prompt templates and token ids (template, tokenizer), the embedded
tasks (arithmetic), packing and preferences.
"""
