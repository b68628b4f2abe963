"""A trial of a chat template in its own process, so that one that never ends shows before a run.

Templates come with the weights and are untrusted. Jinja's sandbox limits everything but time and
memory: `{{ 9**(9**9) }}`, nested loops, a text doubled again and again. The trial does not cover
faults that depend on one text; `faults.hang_timeout` ends a run that hangs in one.
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
_TOO_MUCH = 3  # exit status; a signal may also end it


def rehearse(
    source: str, conversations: Sequence[Sequence[Mapping[str, str]]], variables: Mapping[str, Any]
) -> None:
    """Run a template on conversations, each with and without a generation prompt, and discard the
    output.

    variables: its input besides the messages, such as the special tokens. Errors that it raises are
    not reported: the caller runs it next. Raises ValueError when it exceeds CPU_SECONDS or
    MEMORY_MB.
    """
    _rehearse(
        json.dumps([source, conversations, dict(variables), CPU_SECONDS, MEMORY_MB], default=str)
    )


@functools.cache  # the result does not change
def _rehearse(job: str) -> None:
    # -P: this folder's names must not hide other packages.
    command = [sys.executable, "-P", __file__]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, input=job.encode(), capture_output=True, env=environment)
    if done.returncode == _TOO_MUCH or done.returncode < 0:
        raise ValueError(
            f"the chat template does not end within {CPU_SECONDS} seconds of processor time and "
            f"{MEMORY_MB} MB: replace it, or set chat=False to use none"
        )
    if done.returncode:
        raise ValueError(
            "the trial run of the chat template failed: "
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
        except Exception:  # the caller meets it too, and reports the remedy
            continue
    return 0


if __name__ == "__main__":
    sys.exit(_main())
