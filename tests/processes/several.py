"""What the tests of several processes run in each of them: a function of this file, by its name,
with arguments."""

import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from unofficial import let_every_process_write_programs

from g2d_jax import cli
from g2d_jax import config as settings
from g2d_jax.config import Config, Reward, graph
from g2d_jax.models import hf, lora
from g2d_jax.models.config import Lora
from g2d_jax.recipes.config_load import resolve
from g2d_jax.records import Problem
from g2d_jax.runtime import processes
from g2d_jax.runtime.heartbeat import watched
from g2d_jax.runtime.mesh import make_mesh
from g2d_jax.runtime.tracking import Tracker
from g2d_jax.session import inputs
from g2d_jax.session.reward_manager import RewardManager
from g2d_jax.session.session import Options, Run, loaded, session_of
from g2d_jax.session.workdir import check_token, claim
from g2d_jax.stages import run_stages

let_every_process_write_programs()


def compile_slowly(event: str, duration: float, **fields: str | int) -> None:
    """Make one process compile longer than the others, once.

    SKEW: its index, the seconds, and a part of the program's name.
    """
    if event != "/jax/core/compile/backend_compile_duration" or "SKEW" not in os.environ:
        return
    index, seconds, program = os.environ["SKEW"].split(":")
    if int(index) == processes.index() and program in str(fields.get("fun_name", "")):
        del os.environ["SKEW"]
        print(f"compiling {fields['fun_name']}", flush=True)
        time.sleep(float(seconds))


if "SKEW" in os.environ:
    jax.monitoring.register_event_duration_secs_listener(compile_slowly)


def late(seconds: str) -> None:
    """Execute programs of all devices for which the last process is late: it compiles, or does
    something else, or its devices are at work on a program of their own.

    One adds up over a part of the devices first, so that these have not talked before.
    """
    processes.initialise()
    mesh = jax.make_mesh(
        (2, jax.device_count() // 2),
        ("pairs", "rest"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("pairs", "rest")))
    numbers = np.arange(8 * jax.device_count(), dtype=np.float32)
    array = jax.make_array_from_callback(numbers.shape, where, lambda index: numbers[index])
    last = processes.index() == processes.count() - 1

    def scattered(part: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(jax.lax.psum(part, "pairs"), ("pairs", "rest"), tiled=True)

    def slowly(number: np.float32) -> np.float32:
        time.sleep(float(seconds))
        return number

    with watched(peer_timeout=60, hang_timeout=300):
        spread = jax.jit(
            jax.shard_map(
                scattered, mesh=mesh, in_specs=where.spec, out_specs=where.spec, check_vma=False
            )
        )
        found = []
        for _ in range(2):
            found.append(jax.block_until_ready(spread(array)))
            time.sleep(float(seconds) * last)
        if last:
            jax.jit(lambda x: jax.pure_callback(slowly, x, x))(np.float32(0))  # not waited for here
        found.append(jax.block_until_ready(array + 1))  # a program of JAX's own
    own = [
        np.concatenate([shard.data for shard in each.addressable_shards]).tolist() for each in found
    ]
    print(json.dumps(own))


def run(*arguments: str) -> int:
    return cli.main(["run", *arguments])


def evaluate(*arguments: str) -> int:
    return cli.main(["evaluate", *arguments])


def sample(*arguments: str) -> int:
    return cli.main(["sample", *arguments])


def sweep(*arguments: str) -> int:
    return cli.main(["sweep", *arguments])


def export(*arguments: str) -> int:
    """FULL: bytes that a file of process 0 can have."""
    if "FULL" in os.environ and os.environ["JAX_PROCESS_ID"] == "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FULL"]), resource.RLIM_INFINITY))
    return cli.main(["export", *arguments])


def stages(config_file: str, reference: str, workdir: str) -> None:
    """Every stage by itself, on what another run has of those before it."""
    processes.initialise()
    config, own, other = resolve(config_file), epath.Path(workdir), epath.Path(reference)
    order = graph.plan(Config.of(config))
    jax.devices()  # all at once: each waits for the others here
    with (
        watched(peer_timeout=60, hang_timeout=300),
        Tracker(own if processes.leader() else None, tensorboard=False) as tracker,
    ):
        processes.on_leader(lambda: claim(Config.of(config), own))
        settings = Config.of(config)
        read = inputs.digests(settings)
        first = Run(config=settings, workdir=own, folders={}, tracker=tracker, inputs=read)
        with loaded(first, Options()) as shared:
            for name in order.order:
                folders = {**order.folders(other), name: order.folders(own)[name]}
                session = session_of(dataclasses.replace(first, folders=folders), shared)
                run_stages.run_stage(session, name, order)


def score(peer_timeout: str, hang_timeout: str) -> None:
    """What a stage does with its share of responses: score them, and wait for the others."""
    processes.initialise()
    scorers = RewardManager({"main": Reward(function="small:even")}, make_mesh)
    with watched(peer_timeout=float(peer_timeout), hang_timeout=float(hang_timeout)):
        processes.note_progress("scoring")
        print("scoring", flush=True)
        # a problem each: responses to one problem are scored by one process
        problems = [Problem(name, "1+1", "2") for name in "abcd"]
        print(scorers(problems, ["ab"] * 4, [np.zeros(1, np.int32)] * 4))


def loads(folder: str, output: str) -> None:
    """Load two models on several meshes of all processes, export them again, and print what share
    of a file was read; and whether codes made while loading are those of what was loaded."""
    processes.initialise()
    meshes = {
        "even": {"ft": {"fsdp": 2, "tensor": 2}, "d": {"data": -1, "fsdp": 1}},
        "odd": {"f": {}},
    }
    shares, same = {}, []
    for model, sizes_of in meshes.items():
        source = Path(folder) / model
        for name, sizes in sizes_of.items():
            mesh = make_mesh(**sizes)
            hf.load(source, mesh=mesh)  # programs are compiled, or read from a cache
            before = bytes_read()
            loaded = jax.block_until_ready(hf.load(source, mesh=mesh))
            shares[f"{model}-{name}"] = (bytes_read() - before) / (
                source / "model.safetensors"
            ).stat().st_size
            hf.save(loaded, Path(output) / f"{model}-{name}")
            config = dataclasses.replace(loaded.config, lora=Lora(2, 4.0), quantise="int8")
            codes = hf.load(source, mesh=mesh, config=config)
            equal = jax.jit(lambda *two: jax.tree.map(lambda a, b: (a == b).all(), *two))
            same.append(bool(jax.tree.all(equal(codes, lora.frozen(loaded, codes.config)))))
    processes.gather("saved")  # the leader writes
    print(json.dumps({"shares": shares, "codes": same}))


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def agreement(folder: str) -> None:
    """Every way to agree, and what each process gets; an assertion that fails ends it with another
    status."""
    processes.initialise()
    jax.devices()
    mine, last = processes.index(), processes.count() - 1
    everyone = set(range(processes.count()))
    assert processes.gather({"from": mine}) == [{"from": i} for i in sorted(everyone)]
    assert processes.on_leader(lambda: mine) == 0
    with failure_of(0, "the leader's"):
        processes.on_leader(lambda: fail("the leader's"))
    with pytest.raises(processes.Preempted, match="75"):
        processes.on_leader(preempted)
    together(set(), set())
    for failing, first in (({last}, last), ({0}, 0), (everyone, mine)):
        with failure_of(first, f"{first}'s"):
            together(failing, set())
    with pytest.raises(processes.Preempted, match="75"):
        together(set(), {last})
    with failure_of(0, "0's"):  # one is stopped, and one fails
        together({0}, {last})
    processes.agreed("sizes", [1, 2])
    host = socket.gethostname()
    differ = (
        f"differ between processes: there is process 1 on {host}, here is process 0 on {host}: "
    )
    for what, value, named in (
        ("sizes", [1, mine], "it is [1, 1] there and [1, 0] here. All hosts need"),
        (
            "settings",
            {"a": {"b": 1, "c": mine}, **({} if mine else {"d": 5})},
            "a.c is 1 there and 0 here; d is None",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{what} {differ}{named}")):
            processes.agreed(what, value)
    with pytest.raises(ValueError, match=re.escape(f"files {differ}")):
        files(Path(folder) / f"{mine}.jsonl")
    with pytest.raises(
        (ValueError, processes.PeerFailed),
        match=f"is not the same folder on {host} as for process 0",
    ) as error:
        same_folder(Path(folder) / str(mine))
    assert error.type is (ValueError if mine else processes.PeerFailed)
    processes.check_stop_together()
    for number, status in ((signal.SIGTERM, "75"), (signal.SIGINT, "130")):
        with pytest.raises(processes.Preempted, match=status):
            stopped(last, number)
    array, met = numbers_of_devices(), processes.state.met
    total = jax.jit(lambda x: x.sum())
    assert [int(total(array)) for _ in range(3)] == [sum(everyone)] * 3
    assert processes.state.met == met + 3  # before each of them, not only the first
    met = processes.state.met
    names = ["a/b", "a b", "a%2Fb"]  # of which none meets another one
    with ThreadPoolExecutor(len(names)) as pool:
        list(
            pool.map(
                lambda name: [processes.meet(name, tuple(sorted(everyone))) for _ in range(10)],
                names,
            )
        )
    assert processes.state.met == met + 10 * len(names)
    with failure_of(0, "the leader's"), watched(peer_timeout=60, hang_timeout=60):
        if processes.leader():  # it leaves with an error while the others wait for it
            fail("the leader's")
        processes.gather(0)
    processes.leave(0)


def numbers_of_devices() -> jax.Array:
    """An array of every device's number, on that device."""
    where = jax.sharding.NamedSharding(make_mesh(), jax.sharding.PartitionSpec("fsdp"))
    numbers = np.arange(jax.device_count())
    return jax.make_array_from_callback(numbers.shape, where, lambda index: numbers[index])


@contextlib.contextmanager
def failure_of(index: int, whose: str) -> Iterator[None]:
    """One process has an error of its own, the others are told whose it is."""
    own = processes.index() == index
    text = "" if own else f"process {index} on {socket.gethostname()}: OSError: "
    with pytest.raises(
        OSError if own else processes.PeerFailed, match=f"^{text}{whose} disk is full$"
    ):
        yield


def fail(what: str) -> None:
    raise OSError(f"{what} disk is full")


def preempted() -> None:
    raise processes.Preempted


def together(failing: set[int], stopped: set[int]) -> None:
    with processes.barrier():
        if processes.index() in failing:
            fail(f"{processes.index()}'s")
        if processes.index() in stopped:
            raise processes.Preempted


def same_folder(folder: Path) -> None:
    token = processes.on_leader(lambda: claim(Config.of(settings.base()), epath.Path(folder)))
    with processes.barrier():
        check_token(epath.Path(folder), token)


def files(file: Path) -> None:
    config = settings.base()
    config.data.train = settings.source(str(file))
    processes.agreed("files", inputs.digests(Config.of(config)))


def stopped(index: int, number: signal.Signals) -> None:
    # which a suite in the background ignores
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with watched(peer_timeout=60, hang_timeout=60):
        if processes.index() == index:
            os.kill(os.getpid(), number)
        while True:
            processes.check_stop_together()


def main(name: str, *arguments: str) -> None:
    status = globals()[name](*arguments)
    if (
        processes.count() > 1
    ):  # forked processes end at once, where an interpreter would wait here for the others
        jax.distributed.shutdown()
    sys.exit(status)
