"""python -m g2d_jax is the g2d command."""

import sys

from g2d_jax.cli import main

sys.exit(main())
