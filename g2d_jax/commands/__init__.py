"""Commands on the policies of a run: evaluate them on other problems, export them, show their
answers."""

from g2d_jax.commands.answers import sample
from g2d_jax.commands.evaluation import evaluate
from g2d_jax.commands.exporting import export
from g2d_jax.commands.opening import last_policy, opened, read_config

__all__ = ["evaluate", "export", "last_policy", "opened", "read_config", "sample"]
