"""Run the tiny config in this process, killed by SIGKILL some time after a file appears: see test_resume.py.

python killed.py WORKDIR PATTERN SECONDS      PATTERN: of a file in WORKDIR, "" for never
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from g2d_jax import pipeline
from g2d_jax.resolve import resolve


def watch(workdir: Path, pattern: str, seconds: float) -> None:
    while not list(workdir.glob(pattern)):
        time.sleep(0.0005)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    workdir, pattern, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if pattern:
        threading.Thread(target=watch, args=(workdir, pattern, seconds), daemon=True).start()
    pipeline.run(resolve(str(Path(__file__).parents[1] / "tiny.py")), workdir)
