"""The sections of the settings outside the stages."""
