"""The planned programs are those that a run compiles: the same functions, the same inputs."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from g2d_jax import cli
from g2d_jax.config import Config
from g2d_jax.models.decoder import count_params, count_trained
from g2d_jax.models.table import block_params
from g2d_jax.plan import show
from g2d_jax.plan.planning import Compiler, Entry, Plan, make, planned
from g2d_jax.plan.programs import programs_of
from g2d_jax.plan.search import as_arguments, choices, overrides, search, search_savings
from g2d_jax.plan.topologies import DEVICES, topology
from g2d_jax.plan.work import reads_locally
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.mesh import device_bytes
from g2d_jax.runtime.program import Program
from g2d_jax.runtime.tracking import Screen
from g2d_jax.session.init_params import rest_bytes

TINY = str(Path(__file__).parents[1] / "tiny.py")
SMALL = ["config.model.num_hidden_layers=1", "config.logging.tensorboard=False"]


def compiler(chips, **options):
    """A compiler for so many of the suite's own devices, with a v5e's memory and rates."""
    return Compiler(topology(f"v5e-{chips}"), devices=jax.devices()[:chips], **options)


def planned_on(chips, config):
    return planned(Config.of(config), compiler(chips))


@pytest.mark.slow
def test_what_fits_is_searched_by_compiling(monkeypatch):
    """With the memory of a v5e and with that of none."""
    config, lines = resolve(TINY, SMALL), []
    ours = compiler(8, say=lines.append)
    best = choices(Config.of(config), ours.topology)[0]
    assert search(Config.of(config), ours, stages=["sft"]) == best
    assert [text.partition(":")[0] for text in lines] == [
        f"trying {as_arguments(overrides(best))}",
        "compiling sft, train step",
        "sft, train step",
        "compiling sft, fresh state",
        "sft, fresh state",
    ]
    monkeypatch.setitem(DEVICES, "v5e", dataclasses.replace(DEVICES["v5e"], hbm=1000))
    plan = make(best, ours, stages=["sft"])
    assert [entry.program.name for entry in plan.misfits] == ["fresh state", "train step"]
    assert len(lines) == 5  # nothing was compiled again
    head, *rest = shown(plan, price=2.0)
    assert head.startswith(
        "fits: NO, sft, fresh state: needs 0.00 of 0.00 GiB; sft, train step: needs"
    )
    assert any(
        re.search(r"^\| sft +\| (fresh state|train step) +\| .*\| NO ", line) for line in rest
    )
    monkeypatch.setitem(DEVICES, "v5e", dataclasses.replace(DEVICES["v5e"], hbm=10**9))
    plan = make(best, ours, stages=["sft"])
    head, *rest = shown(plan, price=2.0)
    assert re.fullmatch(
        r"fits: yes, \d+\.\d h on v5e-8 \(at least \d+\.\d\), \d+\.\d\d at 2 a chip-hour "
        r"\(8 chips\)",
        head,
    )
    assert len(rest) == 7 < 15 < len(shown(plan, verbose=True)), rest
    rates = show.rates(plan, 32)
    (trained,) = [
        entry.program.work.trained for entry in plan.entries if entry.program.work.trained
    ]
    each = {"trained": pytest.approx(3600 * show.hours(plan.entries) / trained)}
    assert rates.seconds == {"": each, "sft": each}
    assert (rates.topology, rates.chips, rates.response) == ("v5e-8", 8, 32)
    moments = "stages.sft.optimizer.moment_dtype=bfloat16"
    assert search_savings(config, ours, stages=["sft"]) == [moments, *overrides(best)]
    # Experts have no codes: that is said, and nothing fits.
    pytest.importorskip("qwix", reason="qwix is not installed: the extra quant")
    monkeypatch.setitem(DEVICES, "v5e", dataclasses.replace(DEVICES["v5e"], hbm=1000))
    experts = resolve(TINY, [*SMALL, "config.model.family=qwen3_moe"])
    assert search_savings(experts, ours, stages=["sft"]) == []
    assert "experts cannot be quantised" in lines[-1]


def shown(plan, **options):
    """The lines that say it."""
    file = io.StringIO()
    show.show(plan, Screen(file), **options)
    return file.getvalue().splitlines()


def test_what_is_assumed_is_said():
    entries = []
    for stage in ("collect", "evaluate"):
        entries.append(Entry(Program("decode", None, (), stage=stage)))

    def assumed(prompt, *changes):
        config = Config.of(resolve(TINY, [*SMALL, *changes]))
        return show.assumptions(Plan(topology("v5e-4"), config, None, {}, None, 1, entries, prompt))

    longest = resolve(TINY).data.max_prompt_length
    path = "config.data.test.path=mine.jsonl"
    assert assumed(longest, "config.data.test.limit=none", path) == [
        f"prompts are assumed to have data.max_prompt_length={longest} tokens, since tokenizer and "
        "problems are not all on this machine: set their mean with --prompt N",
        "evaluate: data.test is assumed to have 1,000 problems, since it was not read and has no "
        "limit: set their number with --config.data.test.limit=N",
    ]
    assert assumed(7, "config.data.test.limit=86", path) == []
    train = "config.data.train.path=mine.jsonl", "config.stages.collect.prompts=8192"
    assert assumed(7, *train, "config.data.train.limit=none") == [
        "collect: 8,192 prompts are assumed, since data.train was not read and has no limit: set "
        "their number with --config.data.train.limit=N"
    ]
    assert assumed(7, *train, "config.data.train.limit=3") == []
    assert assumed(7, "config.data.test.limit=none", "config.data.test.path=procedural:slips") == []


def test_the_work_is_of_the_prompts_that_are_here_or_of_a_mean_that_is_told(tmp_path):
    """Prefilled tokens of a stage: its prompts times their mean length."""
    config = resolve(TINY, SMALL)

    def prefilled(config, prompt=None):
        with planned(Config.of(config), compiler(8), prompt) as context:
            counted = sum(program.work.prefilled for program in programs_of(context, "collect"))
            return counted / config.stages.collect.prompts, context.problems.prompt_lengths

    counted, lengths = prefilled(config)
    assert len(set(lengths)) > 1 and counted == pytest.approx(np.mean(lengths))
    assert prefilled(config, 3)[0] == 3
    config.data.test.path = "math500"  # on the hub
    assert not reads_locally(Config.of(config))
    config.data.test.path = f"math500:{tmp_path / 'here.jsonl'}"
    assert not reads_locally(Config.of(config))
    (tmp_path / "here.jsonl").touch()
    assert reads_locally(Config.of(config))
    config.model.path = str(tmp_path)  # without a tokenizer
    assert not reads_locally(Config.of(config))
    (tmp_path / "tokenizer.json").touch()
    assert reads_locally(Config.of(config))
    config.model.path = ""
    config.data.test.path = str(tmp_path / "elsewhere.jsonl")
    assert prefilled(config) == (config.data.max_prompt_length, (config.data.max_prompt_length,))
    config.data.train.limit = 5  # of the 8 prompts that collect asks for
    assert prefilled(config, 3)[0] == 3 * 5 / 8


def test_every_program_of_an_online_and_an_offline_stage_is_compiled():
    """None waits for results of a program that is not there."""
    stages = ["warmup", "dpo"]
    plan = make(Config.of(resolve(TINY, SMALL)), compiler(1), stages=stages)
    assert {entry.program.stage for entry in plan.entries} == set(stages)
    assert set(show.rates(plan, None).seconds) == {"", "online", "offline"}
    assert not [
        (entry.program.stage, entry.program.name, entry.why)
        for entry in plan.entries
        if not entry.compiled
    ]


def test_policies_with_adapters_share_their_base():
    """Beside what is sampled from lie the base, once, the state and the reference's adapters;
    beside the train step, which has the base among its arguments, the latter."""
    config = resolve(TINY, [*SMALL, "config.lora.rank=2", "config.stages.warmup.beta=0.1"])
    with planned_on(1, config) as context:
        programs = {program.name: program for program in programs_of(context, "warmup")}
        state, _, _, _, rest = programs["train step"].inputs
        adapters, base = 4 * count_trained(context.model_config), device_bytes(rest)
        assert device_bytes(programs["train step"].other_resident()) == adapters < base
        assert (
            device_bytes(programs["view"].other_resident())
            == device_bytes(state.opt_state) + adapters
        )
        own = device_bytes(programs["insert"].inputs[0])
        beside = device_bytes(programs["prefill"].other_resident())
        assert beside == device_bytes(state) + adapters + base + own
        programs = {program.name: program for program in programs_of(context, "collect")}
        own = device_bytes(programs["insert"].inputs[0])
        assert device_bytes(programs["prefill"].other_resident()) == base + own


@pytest.mark.parametrize(
    ("kind", "bits", "scale", "tiles"),
    [("", 16, 0, {}), ("int8", 8, 4, {"down": 64}), ("nf4", 4, 2, {"o": 16})],
)
def test_adapters_are_planned_beside_their_base(kind, bits, scale, tiles):
    """Of codes a float32 scale for each output, or a bfloat16 one for each of its tiles: of 32
    numbers, of 16 within a head."""
    if kind:
        pytest.importorskip("qwix", reason="qwix is not installed: the extra quant")
    dtype = "float32" if kind else "bfloat16"
    lora = ["config.lora.rank=2", f"config.lora.quantise={kind}", f"config.lora.base_dtype={dtype}"]
    config = resolve(TINY, [*SMALL, *lora])
    with planned_on(1, config) as context:
        fresh, step = programs_of(context, "sft")
        model, (state, _, _, _, rest) = context.model_config, step.inputs
        # parameters and moments; two counts
        assert device_bytes(state) == 3 * 4 * count_trained(model) + 2 * 4
        sizes = {
            name: math.prod(row.shape) for name, row in block_params(model).items() if row.quantised
        }
        layers = sum(
            size * (bits / 8 + scale / tiles.get(name, 32)) for name, size in sizes.items()
        )
        others = count_params(model.base) - sum(sizes.values()) * model.num_hidden_layers
        assert device_bytes(rest) == layers * model.num_hidden_layers + (4 if kind else 2) * others
        assert (
            device_bytes(rest)
            == device_bytes(fresh.other_resident())
            == rest_bytes(Config.of(config), model)
        )
        step.lower()


def test_a_local_model_folder_and_a_name_give_shapes_without_a_download(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = resolve("bridging-math:method=grpo,model=qwen2.5-7b", [])
    with planned_on(8, config) as context:
        assert context.model_config.hidden_size == 3584
        step = programs_of(context, "train")[-1]
        assert step.name == "train step"
        assert step.inputs[1]["ref_logprob"].shape[2] == 1024 + 2048


def test_a_reward_model_is_scored_with_and_stays(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = resolve("bridging-chat:method=s1", ["config.reward.model.batch_tokens=16384"])
    with planned_on(8, config) as context:
        programs = {program.name: program for program in programs_of(context, "train")}
        reward = programs["reward"]
        model, tokens, lengths = reward.inputs
        assert tokens.shape == (8, 4096) and lengths.shape == (8,)
        size = device_bytes(model)
        trunk = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
        assert 2 * trunk / 8 < size < 2 * trunk / 8 * 1.001
        state = programs["train step"].inputs[0]
        assert device_bytes(programs["train step"].other_resident()) >= size
        assert device_bytes(
            programs["reference log-probs"].other_resident()
        ) >= size + device_bytes(state)
        longest, stage = config.data.max_prompt_length + 1024, config.stages.train
        assert reward.work.scored == 8 * stage.steps * stage.prompts_per_step * longest
    # a reward model scores one of the two tasks, with a third of the weight
    config = resolve("bridging-mixed", [])
    with planned_on(8, config) as context:
        scored = sum(
            program.work.scored
            for program in programs_of(context, "train")
            if "reward" in program.name
        )
        asked = (
            config.stages.train.prompts_per_step
            * config.stages.train.steps
            * config.stages.train.num_generations
        )
        longest = config.data.max_prompt_length + config.stages.train.sampling.max_new_tokens
        assert scored == pytest.approx(asked * longest / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v5e-17"], "did you mean v5e-1"),
        (
            ["--topology", "v5e-4", "--stage", "warm"],
            "no stage 'warm'; the stages are collect, dpo, evaluate, sft, warmup",
        ),
        (
            ["--topology", "v5e-4", "--response", "0"],
            "--prompt and --response must be at least 1",
        ),
        (["--topology", "v5e-4", "--price", "-1"], "--price must not be negative"),
        (
            ["--topology", "v5e-4", "--config", "sweep-k:preset=smoke"],
            "describes a study: plan its runs",
        ),
    ],
)
def test_mistakes_are_told_before_any_work(capsys, arguments, message):
    assert cli.main(["plan", "--config", TINY, *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("v5e-4", "libtpu", "plan"), ("h100x1", "jax_plugins", "cuda")]
)
def test_a_missing_compiler_is_named_with_its_extra(capsys, name, package, extra):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    assert cli.main(["plan", "--config", TINY, "--topology", name]) == 1
    assert f"pip install '.[{extra}]'" in capsys.readouterr().err


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which compiles for TPUs, is absent"
)

needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="the extra cuda is not installed"
)


def run_apart(*arguments):
    """Run Python in a process of its own, since libtpu reads the environment once; return what it
    printed."""
    paths = os.pathsep.join([str(Path(TINY).parent), *sys.path])
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_libtpu
def test_a_train_step_compiled_for_a_tpu():
    """As a user types it."""
    overrides = ["--stage", "sft", *(f"--{item}" for item in SMALL), "--config.dtype=bfloat16"]
    text = run_apart(
        "-m",
        "g2d_jax",
        "plan",
        "--config",
        TINY,
        "--topology",
        "v5e-4",
        "--price",
        "1.5",
        *overrides,
    )
    rows = {
        cells[1].strip(): cells for line in text.splitlines() if len(cells := line.split("|")) > 6
    }
    assert rows["sft"][2].strip() == "train step" and "fits: yes, 0.0 h on v5e-4" in text


SLICES = """
from g2d_jax.plan import target, planning
from g2d_jax.plan.programs import programs_of
from g2d_jax.plan.topologies import topology
from g2d_jax.config import Config
from g2d_jax.recipes.config_load import resolve
machine = topology("2xv5e-4")
target.prepare(machine)
compiler = planning.Compiler(machine)
config = Config.of(resolve({tiny!r}, ["mesh.data=2"]))
with planning.planned(config, compiler) as context:
    print("mesh", *context.mesh.shape.values(), *(device.slice_index for device in context.mesh.devices.flat))
    for stage in config.stages:
        for entry in compiler.entries(programs_of(context, stage), context):
            compiled = entry.compiled
            sent = sum(compiled.sent.values())
            print("program", stage, entry.program.name, compiled.far, sent, compiled.unknown, sep=",")
"""


@pytest.mark.slow
@needs_libtpu
def test_every_stage_on_two_tpu_slices():
    """Gradients go over the network between them, sampled tokens and weights do not, but for a few
    flags."""
    lines = run_apart("-c", SLICES.format(tiny=TINY)).splitlines()
    assert [line for line in lines if line.startswith("mesh")] == ["mesh 2 4 1 0 0 0 0 1 1 1 1"]
    rows = [line.split(",")[1:] for line in lines if line.startswith("program")]
    assert {stage for stage, *_ in rows} == set(resolve(TINY).stages)
    assert all(unknown == "0" for *_, unknown in rows)
    with planned_on(1, resolve(TINY)) as context:
        parameters = 4 * count_params(context.model_config)
    for _, name, far, sent, _ in rows:
        if (
            name == "train step"
        ):  # each device sends its share of the gradients, twice, of which the slice keeps a half
            assert parameters / 4 < float(far) < float(sent)
        else:
            assert float(far) < 4096, (name, far)


@needs_libtpu
def test_a_mesh_that_cannot_go_over_tpu_slices_is_refused_with_the_setting():
    with pytest.raises(AssertionError, match=r"8 devices are 2 slices.*set mesh.data=2"):
        run_apart("-m", "g2d_jax", "plan", "--config", TINY, "--topology", "2xv5e-4")


SAMPLER = """
from g2d_jax.plan import target, planning
from g2d_jax.plan.programs import programs_of
from g2d_jax.plan.topologies import topology
from g2d_jax.config import Config
from g2d_jax.recipes.config_load import resolve
from g2d_jax.runtime.mesh import device_bytes
machine = topology("v5e-16")
target.prepare(machine)
compiler = planning.Compiler(machine)
with planning.planned(Config.of(resolve({tiny!r}, {overrides!r})), compiler) as context:
    for program in programs_of(context, "warmup"):
        if program.name in ("view", "empty", "prefill", "insert", "decode"):
            compiled = compiler.compile(program)
            size = 1
            if program.name in ("insert", "decode"):
                state = program.inputs[program.name == "decode"]
                size = device_bytes((state.cache.keys, state.cache.values))
            more = (compiled.peak - device_bytes(program.inputs)) / size
            kernels = program.lower().as_text().count("@tpu_custom_call")
            print("program", program.name, more, sum(compiled.sent.values()), kernels)
"""


@needs_libtpu
@pytest.mark.parametrize(
    ("tensor", "attention"),
    [(8, "auto"), pytest.param(4, "xla", marks=pytest.mark.slow)],
)
def test_the_sampler_on_a_tpu_of_four_hosts(tensor, attention):
    """No program copies the cache, insert sends nothing, and decode does not send the cache, with 4
    key heads."""
    shape = [
        "model.num_hidden_layers=16",
        "model.hidden_size=512",
        "model.num_key_value_heads=4",
        "dtype=bfloat16",
    ]
    lengths = [
        "stages.warmup.sampling.max_new_tokens=2000",
        "stages.warmup.policy=init",
    ]
    rows = [
        "model.num_attention_heads=8",
        "compute.max_num_seqs=128",
        "stages.warmup.prompts_per_step=32",
    ]
    kernels = [f"compute.sampling_tensor={tensor}", f"compute.attention={attention}"]
    overrides = [*shape, *lengths, *rows, *kernels]
    text = run_apart("-c", SAMPLER.format(tiny=TINY, overrides=overrides))
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("program ")]
    more, sent, called = ({name: float(row[i]) for name, *row in rows} for i in (0, 1, 2))
    assert sent.keys() == {"view", "empty", "prefill", "insert", "decode"}
    assert (
        more["insert"] < 0.2
        and more["decode"] < 0.2
        and sent["insert"] == 0
        and sent["decode"] < 8e7  # of a chunk of 16 steps; the cache has 4.6 GB
    ), (more, sent)
    assert called["decode"] == (attention == "auto")


RECIPE = """
from g2d_jax.plan import target, planning
from g2d_jax.plan.hlo import bytes_sent, collectives
from g2d_jax.plan.programs import programs_of
from g2d_jax.plan.topologies import topology
from g2d_jax.config import Config
from g2d_jax.recipes.config_load import resolve
machine = topology("v5e-16")
target.prepare(machine)
compiler = planning.Compiler(machine)
for overrides in ([], ["compute.sampling_tensor=16"]):
    with planning.planned(Config.of(resolve("qwen2.5-7b", overrides)), compiler) as context:
        programs = {program.name: program for program in programs_of(context, "warmup")}
        sampler, decode = context.sampling.sampler, programs["decode"]
        mesh = sampler.mesh
        compiled = decode.lower().compile()
        if not overrides:
            print("view", compiler.compile(programs["view"]).peak / 2**30)
    sending = collectives(compiled.as_text(), decode.trips)
    count = sum(each.times for each in sending) / decode.trips
    sent = sum(bytes_sent(sending).values()) / decode.trips / 1e6
    logits = 4 * decode.work.rows * 152064 // mesh.shape["tensor"]
    kinds = [each.kind for each in sending if each.size == logits]
    peak = compiled.memory_analysis().peak_memory_in_bytes / 2**30
    print("step", *mesh.shape.values(), decode.work.rows, count, sent, peak, *kinds)
"""


@needs_libtpu
def test_a_decode_step_of_the_7b_recipe_on_a_tpu():
    """On v5e-16, counted with trip counts: two collectives a layer, and five. Over more ways than
    key heads the logits are sums, of which each device gets those of its rows. The sampler's
    parameters are written without a second copy of them."""
    lines = [line.split() for line in run_apart("-c", RECIPE).splitlines()]
    chosen, whole = (line[1:] for line in lines if line[0] == "step")
    assert chosen[:4] == ["4", "1", "4", "352"] and whole[:4] == ["1", "4", "4", "128"]
    count, sent, peak = map(float, chosen[4:7])
    assert count <= 70 and sent <= 65 and peak < 8
    count, sent, _ = map(float, whole[4:7])
    assert count <= 240 and sent <= 160 and whole[7:] == ["reduce-scatter"]
    (written,) = (float(line[1]) for line in lines if line[0] == "view")
    own, training = 2 * 7.62e9 / 4 / 2**30, 4 * 7.62e9 / 16 / 2**30
    assert written < own + training + own / 2


GPU_SAMPLER = """
import re
from functools import partial
from g2d_jax.plan import target
from g2d_jax.plan.topologies import topology
machine = topology("{machine}x2")
target.prepare(machine)
import jax
import jax.numpy as jnp
import numpy as np
from g2d_jax.runtime import mesh as meshes
from g2d_jax.models import decoder
from g2d_jax.models.config import ModelConfig
from g2d_jax.records import SamplingParams
from g2d_jax.sampler import programs
from g2d_jax.sampler.engine import Sampler
mesh = meshes.make_mesh(1, 1, 2, devices=target.devices(machine))
config = ModelConfig("qwen2", 1024, 256, 2, 12, 2, {head_dim}, 512, tie_word_embeddings=True)
bfloat16 = jnp.dtype("bfloat16")
sampler = Sampler(config, mesh, seed=0, max_num_seqs=32, dtype=bfloat16)
shapes = sampler.shapes(4, 32, [SamplingParams(900, top_k=5, top_p=0.9)], [100])
state, _ = sampler.abstract(shapes)
shardings = decoder.unstacked_shardings(config, mesh)
params = meshes.placed(jax.eval_shape(decoder.unstack, decoder.abstract(config, bfloat16)), shardings)
codes = jax.ShapeDtypeStruct((2,), np.int32, sharding=meshes.sharding(mesh, ("devices",), (2,)))
sizes = {{"chunk": sampler.chunk, "filters": shapes.filters}}
for kernel in ("xla", "pallas"):
    branches = programs.may_branch(mesh)
    chunk = partial(programs.decode_chunk, kernel=kernel, branches=branches, **sizes)
    run = jax.jit(partial(chunk, mesh=mesh, dtype=bfloat16), donate_argnums=1)
    compiled = run.lower(params, state, codes).compile()
    text = compiled.as_text()
    loops = re.findall(r" while\\(.*", text)
    unknown = sum("known_trip_count" not in loop for loop in loops)
    more = compiled.memory_analysis().temp_size_in_bytes / meshes.device_bytes(state.cache)
    called = len(re.findall(r"%pallas_call[\\w.]* = .* custom-call\\(", text))
    print("program", len(loops), unknown, len(re.findall(r" conditional\\(", text)), called, more)
"""


@needs_cuda
@pytest.mark.slow
def test_decode_on_a_gpu_waits_for_nothing():
    """Loops have known trip counts and nothing is conditional, so that the host launches a chunk
    ahead; the kernel of decode steps compiles, once a layer, and does not copy the cache."""
    text = run_apart("-c", GPU_SAMPLER.format(machine="h100", head_dim=128))
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("program ")]
    for (loops, unknown, conditionals, called, more), kernels in zip(rows, (0, 2), strict=True):
        assert int(loops) >= 3, "steps, and a search for each filter"
        assert (int(unknown), int(conditionals), int(called)) == (0, 0, kernels)
        assert float(more) < 0.5
