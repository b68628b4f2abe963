"""python -m g2d_jax is the g2d command."""

import sys

from g2d_jax.commands.cli import main

sys.exit(main())
