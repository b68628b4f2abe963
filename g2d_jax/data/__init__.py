"""Data: problems and examples (rows ► fields ► filters ► collect), their splits, their order in
training (loader, curriculum), prompt templates and token ids (template, tokenizer), the embedded
tasks (arithmetic), packing and preferences.
"""
