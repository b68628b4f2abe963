"""Stands in for kubectl with JobSet's controller, and for sky: runs a manifest on local processes
by its own rules.

kubectl apply -f FILE, sky jobs launch FILE --env NAME=VALUE …: both wait for the end, write it to
$RECORD/ended and the number of restarts to $RECORD/restarts. g2d is bin/fake-g2d.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RECORD = Path(os.environ["RECORD"])


def together(commands: list[list[str]], environments: list[dict[str, str]]) -> list[int]:
    """Run commands side by side; return their statuses, 128 and more for a signal, as a container
    or a shell has it."""
    running = [
        subprocess.Popen(command, env=os.environ | own, cwd=own.get("HOME"))
        for command, own in zip(commands, environments, strict=True)
    ]
    statuses = [process.wait() for process in running]
    return [128 - status if status < 0 else status for status in statuses]


def ended(how: str, restarts: int) -> None:
    (RECORD / "ended").write_text(how)
    (RECORD / "restarts").write_text(str(restarts))


def fails(job: dict[str, Any], status: int) -> bool:
    """Return whether the Job's own policy fails it as a whole, in place of counting a failed
    pod."""
    for rule in job.get("podFailurePolicy", {"rules": []})["rules"]:
        codes = rule.get("onExitCodes")
        if status and codes and rule["action"] == "FailJob":
            listed = status in codes["values"]
            if listed == (codes["operator"] == "In"):
                return True
    return False


def kubectl(manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    pods = job["completions"]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    for restarts in range(spec["failurePolicy"]["maxRestarts"] + 1):
        command = [str(HERE / "bin" / "fake-g2d"), *container["args"]]
        statuses = together([command] * pods, [{"HOST": str(pod)} for pod in range(pods)])
        if not any(statuses):
            return ended("Completed", restarts)
        why = (
            "PodFailurePolicy"
            if any(fails(job, status) for status in statuses)
            else "BackoffLimitExceeded"
        )
        for rule in spec["failurePolicy"]["rules"]:
            if rule["action"] == "FailJobSet" and why in rule["onJobFailureReasons"]:
                return ended("Failed", restarts)
    return ended("Failed", restarts)


def sky(task: dict[str, Any], given: dict[str, str]) -> None:
    nodes = task["num_nodes"]
    recover = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    homes = [RECORD / f"node{node}" for node in range(nodes)]
    places = [
        task["envs"]
        | given
        | {
            "HOME": str(home),
            "HOST": str(node),
            "SKYPILOT_NUM_NODES": str(nodes),
            "SKYPILOT_NODE_RANK": str(node),
        }
        | {"SKYPILOT_NODE_IPS": "\n".join(f"10.0.0.{node}" for node in range(nodes))}
        for node, home in enumerate(homes)
    ]
    restarts = 0
    while True:
        for home in homes:
            home.mkdir(exist_ok=True)
        if any(together([["bash", "-c", task["setup"]]] * nodes, places)):
            return ended("FAILED_SETUP", restarts)
        statuses = [
            status for status in together([["bash", "-c", task["run"]]] * nodes, places) if status
        ]
        if not statuses:
            return ended("SUCCEEDED", restarts)
        if not set(statuses) <= set(recover):
            return ended("FAILED", restarts)
        restarts += 1


if __name__ == "__main__":
    tool, *arguments = sys.argv[1:]
    file = next(argument for argument in arguments if argument.endswith(".yaml"))
    manifest = yaml.safe_load(Path(file).read_text())
    if tool == "kubectl":
        kubectl(manifest)
    else:
        sky(manifest, dict(argument.split("=", 1) for argument in arguments if "=" in argument))
