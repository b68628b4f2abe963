"""Memory, time and cost of a run on a target machine, for which its programs are compiled ahead of
time.

name ─► topologies ─► compiling: devices        config ─► programs: jitted functions, abstract inputs
                └──────────────┬──────────────────────────────┘
                            planning ─► memory, collectives (hlo), times (work) ─► show, search
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from g2d_jax.config import Config, check
from g2d_jax.plan.topologies import topology
from g2d_jax.study.pricing import Rates

if TYPE_CHECKING:
    from g2d_jax.plan import planning


def plan(
    config: ConfigDict,
    name: str,
    *,
    price: float | None = None,
    prompt: int | None = None,
    response: int | None = None,
    stages: tuple[str, ...] = (),
    auto: bool = False,
    verbose: bool = False,
) -> bool:
    """Print the plan of a run on the named machine; return whether it fits.

    price: of a chip-hour. prompt, response: mean tokens of each. stages: those to plan, () for all.
    auto: whether to choose mesh, micro-batch and remat. verbose: whether to show every program.
    Call it in a process that has not used JAX, since it sets the environment. Raises ValueError for
    a name or settings that cannot work, ImportError if the compiler is not installed.
    """
    lengths = (length for length in (prompt, response) if length is not None)
    if min(lengths, default=1) < 1 or (price or 0) < 0:
        raise ValueError(
            "--prompt and --response must be at least 1, and --price must not be negative: got "
            f"prompt {prompt}, response {response}, price {price}"
        )
    settings = Config.of(config)
    if unknown := [stage for stage in stages if stage not in config.stages]:
        raise ValueError(f"no stage {unknown[0]!r}; the stages are {', '.join(config.stages)}")
    from g2d_jax.runtime.tracking import Screen

    screen = Screen()
    compiler = _compiler(settings, name, screen.say)
    from g2d_jax.plan import planning, search, show

    if auto:
        choice = search.search(settings, compiler, stages=stages)
        if choice is None:
            tried = f"none of the {search.MOST_TRIED} settings tried fits {name}"
            screen.say(f"{tried}; plan without --auto to try bfloat16 moments and LoRA too")
            return False
        screen.say(f"chosen: {search.as_arguments(search.overrides(choice))}")
        settings = choice
    run_plan = planning.make(settings, compiler, stages=stages, prompt=prompt, response=response)
    show.show(run_plan, screen, price=price, response=response, verbose=verbose)
    if run_plan.misfits and not auto:
        choice = search.search(settings, compiler, stages=stages)
        if choice is not None:
            screen.say(f"settings that fit: {search.as_arguments(search.overrides(choice))}")
        elif changed := search.search_savings(config, compiler, stages=stages):
            screen.say(f"settings that fit but change the result: {search.as_arguments(changed)}")
        else:
            screen.say(
                "none of the settings tried fits, with or without bfloat16 moments, LoRA and, if the "
                "extra quant is installed, an int8 base; use a larger machine"
            )
    return not run_plan.misfits


def rates(
    config: ConfigDict, name: str, say: Callable[[str], None], response: int | None = None
) -> Rates:
    """Compute how fast a recipe's stages process tokens on a machine, except for SFT and
    evaluation.

    See `plan`. Raises ValueError also if the recipe does not fit the machine.
    """
    settings = Config.of(config)
    compiler = _compiler(settings, name, say)
    from g2d_jax.config.graph import plan as order_of
    from g2d_jax.plan import planning, show

    stages = []
    for stage in order_of(settings).order:
        if settings.stages[stage].kind not in ("sft", "evaluate"):
            stages.append(stage)
    run_plan = planning.make(settings, compiler, stages=stages, response=response)
    if run_plan.misfits:
        raise ValueError(
            f"{config.name} on {name}: {show.verdict(run_plan, None)}; see g2d plan --auto"
        )
    return show.rates(run_plan, response)


def _compiler(settings: Config, name: str, say: Callable[[str], None]) -> planning.Compiler:
    """Set the environment and create the compiler for the named machine."""
    machine = topology(name)
    from g2d_jax.plan import target

    target.prepare(machine)
    from g2d_jax.plan import planning
    from g2d_jax.stages import run_stages

    check.checked(settings)
    return planning.Compiler(machine, say)
