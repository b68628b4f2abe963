"""What the tests of several processes run in each of them.

python several.py stages CONFIG REFERENCE WORKDIR    each stage by itself, on what REFERENCE has of those before it
python several.py NAME                               a function of this file; what it returns is printed as JSON
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from g2d_jax import pipeline, processes
from g2d_jax.resolve import resolve
from g2d_jax.stages.context import Context
from g2d_jax.tracking import Tracker
from g2d_jax.workdir import claim


def stages(config_file: str, reference: str, workdir: str) -> None:
    """Every stage from the same artefacts, those of another run."""
    config, own, other = resolve(config_file), epath.Path(workdir), epath.Path(reference)
    order = pipeline.plan(config)
    with (
        processes.watched(peer_timeout=60, hang_timeout=300),
        Tracker(own if processes.leader() else None, tensorboard=False) as tracker,
    ):
        processes.once(lambda: claim(config, own))
        first = Context(config, own, tracker, {})
        with contextlib.closing(first):
            for name in order.order:
                folders = {**order.folders(other), name: order.folders(own)[name]}
                pipeline.run_stage(first.at(config, folders, tracker), name, order)


if __name__ == "__main__":
    chosen, *arguments = sys.argv[1:]
    processes.initialise()
    print(json.dumps(globals()[chosen](*arguments)))
