"""The manifests and images: valid against trimmed schemas, and saying what docs/launch.md says they
do."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from stand import LAUNCH, ROOT, environment, starts

from g2d_jax import cli
from g2d_jax.recipes.config_load import resolve

SCHEMAS = Path(__file__).parent / "schemas"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMAGES = ("tpu", "cuda")


def valid(manifest: dict, schema: str) -> dict:
    jsonschema.Draft202012Validator(json.loads((SCHEMAS / schema).read_text())).validate(manifest)
    return manifest


@pytest.fixture
def jobset() -> dict:
    return valid(yaml.safe_load((LAUNCH / "gke-jobset.yaml").read_text()), "jobset.json")


@pytest.fixture
def task() -> dict:
    return valid(yaml.safe_load((LAUNCH / "skypilot.yaml").read_text()), "skypilot.json")


def test_a_misspelt_field_is_found(jobset: dict, task: dict) -> None:
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 1
    task["resources"]["use_spots"] = True
    for manifest, schema in ((jobset, "jobset.json"), (task, "skypilot.json")):
        with pytest.raises(jsonschema.ValidationError, match=r"backofLimit|use_spots"):
            valid(manifest, schema)


def test_jobset_fails_on_1_and_2_and_restarts_on_the_rest(jobset: dict) -> None:
    policy = jobset["spec"]["failurePolicy"]
    # without a rule: RestartJobSet
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]
    assert policy["maxRestarts"] > 0
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": "g2d", "operator": "In", "values": [1, 2]}
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"


def test_jobset_has_a_pod_for_each_host_of_the_slice(jobset: dict) -> None:
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    hosts = rows * columns // container["resources"]["limits"]["google.com/tpu"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == hosts
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["terminationGracePeriodSeconds"] >= 30
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_RESOURCE"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    workdir = container["args"][container["args"].index("--workdir") + 1]
    assert container["args"][0] == "run" and workdir.startswith("gs://")


def test_jobset_of_two_slices_is_valid_and_its_mesh_goes_over_them(jobset: dict) -> None:
    """As its comment and docs/launch.md say: every job is a slice, and GKE tells the pods which."""
    (slices,) = jobset["spec"]["replicatedJobs"]
    slices["replicas"] = 2
    (container,) = slices["template"]["spec"]["template"]["spec"]["containers"]
    container["args"].append("--config.mesh.data=2")
    valid(jobset, "jobset.json")
    # a node pool for each
    assert jobset["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    _, overrides = cli.parse(container["args"])
    assert resolve("demo", overrides).mesh.data == slices["replicas"]


@pytest.mark.parametrize(
    ("plan", "status"), [("0", 0), ("1", 1), ("2", 2), ("75", 75), ("kill", 75), ("130", 130)]
)
def test_skypilot_recovers_on_75_and_death(
    tmp_path: Path, task: dict, plan: str, status: int
) -> None:
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    env = environment(tmp_path, plan, **task["envs"], SKYPILOT_NUM_NODES="1")
    done = subprocess.run(
        ["bash", "-c", task["run"]], env=env, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, starts(tmp_path)) == (status, 1)
    command = "run --config demo --workdir gs://BUCKET/runs/demo --config.checkpoint.every=10"
    assert (tmp_path / "starts0").read_text() == f"{command}\n"


def test_skypilot_tells_each_node_its_place(tmp_path: Path, task: dict) -> None:
    nodes = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    env = environment(tmp_path, **task["envs"], **nodes)
    env["G2D_COMMAND"] = "env"  # `env run --config …` fails; what it was given is what counts
    script = re.sub(
        r"(\$\{G2D_COMMAND:-g2d\}).*?(?=\nstatus=)", r"\1", task["run"], flags=re.DOTALL
    )
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert {
        "JAX_COORDINATOR_ADDRESS=10.0.0.1:8476",
        "JAX_NUM_PROCESSES=2",
        "JAX_PROCESS_ID=1",
    } <= set(done.stdout.splitlines())


def instructions(image: str) -> list[list[str]]:
    lines = (LAUNCH / f"Dockerfile.{image}").read_text().splitlines()
    return [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("image", IMAGES)
def test_image_installs_its_extra_and_starts_g2d(image: str) -> None:
    found = instructions(image)
    (base,) = [rest for word, rest in found if word == "FROM"]
    assert re.fullmatch(r"python:3\.1[12]\.\d+-slim-\w+", base)  # a version, not a moving tag
    (install,) = [
        shlex.split(rest) for word, rest in found if word == "RUN" and "pip install" in rest
    ]
    # this checkout, in its own image's kind
    (spec,) = [word for word in install if word.startswith(".[")]
    assert image in spec.strip(".[]").split(",")  # the others: test_extras.py
    (entry,) = [json.loads(rest) for word, rest in found if word == "ENTRYPOINT"]
    assert entry == ["g2d"] and PROJECT["project"]["scripts"] == {"g2d": "g2d_jax.cli:main"}
    words = [word for word, _ in found]
    assert words.index("USER") > max(at for at, word in enumerate(words) if word == "RUN")
    assert dict(found[words.index("USER") :])["USER"] != "root"


@pytest.mark.parametrize("image", IMAGES)
def test_image_has_every_file_that_the_wheel_is_made_of(image: str) -> None:
    copied = {
        name for word, rest in instructions(image) if word == "COPY" for name in rest.split()[:-1]
    }
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    project = PROJECT["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    needed |= {*wheel["packages"], *wheel["force-include"]}
    assert copied == needed
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored and {line[1:] for line in ignored if line.startswith("!")} == copied


def test_every_launcher_is_documented() -> None:
    text = (ROOT / "docs" / "launch.md").read_text()
    missing = [file.name for file in LAUNCH.iterdir() if f"`launch/{file.name}`" not in text]
    assert missing == []
