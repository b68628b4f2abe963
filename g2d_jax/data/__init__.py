"""Data: problems and examples (rows ► fields ► collect), their splits, the order they are drawn in (loader), prompt
templates and token ids (template, tokenizer), the embedded task (arithmetic), packing and preferences.
"""
