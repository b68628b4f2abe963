"""Extras: optional packages of pyproject.toml, and how to install them while no registry has
g2d-jax."""

from __future__ import annotations


def install(extra: str) -> str:
    """Return the command that installs an extra, and where to give it."""
    return f"pip install '.[{extra}]' in the folder of g2d_jax's repository"


def missing(need: str, extra: str) -> ImportError:
    """Return the error for an extra that is not installed. need: what cannot be done without, for
    the message."""
    return ImportError(f"{need}, from an extra that is not installed: {install(extra)}")
