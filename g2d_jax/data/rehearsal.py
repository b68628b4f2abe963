"""A chat template tried out in a process of its own, so that one that never ends shows before a run
and not in it.

Templates come with the weights and are untrusted. Jinja's sandbox keeps them from everything but
time and memory: `{{ 9**(9**9) }}`, nested loops, a text doubled again and again. What a template
does on one text alone is not seen here; a run that hangs in it is ended by `faults.hang_timeout`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CPU_SECONDS = 5
MEMORY_MB = 1024
_TOO_MUCH = 3  # exit status; a signal is another way to end for it


def rehearse(
    source: str, conversations: Sequence[Sequence[Mapping[str, str]]], variables: Mapping[str, Any]
) -> None:
    """Run a template on conversations, each with and without a generation prompt, and throw away
    what it writes.

    variables: what it is given beside the messages, such as the special tokens. What it raises is
    not told: the caller runs it next. Raises ValueError when it takes more than CPU_SECONDS or
    MEMORY_MB.
    """
    _rehearse(
        json.dumps([source, conversations, dict(variables), CPU_SECONDS, MEMORY_MB], default=str)
    )


@functools.cache  # what passed once passes again
def _rehearse(job: str) -> None:
    # -P: this folder's names must not hide other packages.
    command = [sys.executable, "-P", __file__]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, input=job.encode(), capture_output=True, env=environment)
    if done.returncode == _TOO_MUCH or done.returncode < 0:
        raise ValueError(
            f"the chat template does not end within {CPU_SECONDS} seconds of processor time and "
            f"{MEMORY_MB} MB: replace it, or set chat=False to do without it"
        )
    if done.returncode:
        raise ValueError(
            "the chat template could not be tried out: "
            f"{done.stderr.decode(errors='replace')[-500:]}"
        )


def _main() -> int:
    import resource

    from transformers.utils.chat_template_utils import render_jinja_template

    source, conversations, variables, cpu_seconds, memory_mb = json.load(sys.stdin)
    seconds = int(time.process_time()) + 1 + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if sys.platform == "linux":  # other kernels do not enforce it
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (memory_mb << 20),) * 2)
    for conversation, generation in itertools.product(conversations, (False, True)):
        try:
            render_jinja_template(
                [conversation], chat_template=source, add_generation_prompt=generation, **variables
            )
        except MemoryError:
            return _TOO_MUCH
        except Exception:  # the caller meets it too, and says what to do
            continue
    return 0


if __name__ == "__main__":
    sys.exit(_main())
