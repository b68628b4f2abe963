"""The needs and the cost of a run on a target machine: its programs are compiled for it ahead of
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
    """Print the plan of a run on the machine of this name; return whether it fits.

    price: of one chip for an hour. prompt, response: their mean tokens. stages: those to plan, ()
    for all. auto: choose mesh, micro-batch and remat. verbose: show every program, too. Call it in
    a process that has not used JAX: the environment is set here. Raises ValueError for a name or
    settings that cannot work, ImportError where the compiler is not installed.
    """
    lengths = (length for length in (prompt, response) if length is not None)
    if min(lengths, default=1) < 1 or (price or 0) < 0:
        raise ValueError(
            "a prompt and a response have at least one token and a price is not negative: got "
            f"prompt {prompt}, response {response}, price {price}"
        )
    settings = Config.of(config)
    if unknown := [stage for stage in stages if stage not in config.stages]:
        raise ValueError(f"no stage {unknown[0]!r}; there are {', '.join(config.stages)}")
    from g2d_jax.runtime.tracking import Screen

    screen = Screen()
    compiler = _compiler(settings, name, screen.say)
    from g2d_jax.plan import planning, search, show

    if auto:
        choice = search.search(settings, compiler, stages=stages)
        if choice is None:
            tried = f"none of the {search.MOST_TRIED} settings tried fits {name}"
            screen.say(f"{tried}; without --auto, bfloat16 moments and LoRA are tried too")
            return False
        screen.say(f"chosen: {search.as_arguments(search.overrides(choice))}")
        settings = choice
    run_plan = planning.make(settings, compiler, stages=stages, prompt=prompt, response=response)
    show.show(run_plan, screen, price=price, response=response, verbose=verbose)
    if run_plan.misfits and not auto:
        choice = search.search(settings, compiler, stages=stages)
        if choice is not None:
            screen.say(f"what would fit: {search.as_arguments(search.overrides(choice))}")
        elif changed := search.search_savings(config, compiler, stages=stages):
            screen.say(f"what would fit, with another result: {search.as_arguments(changed)}")
        else:
            screen.say(
                "what would fit: none of the settings tried, neither with bfloat16 moments nor "
                "with LoRA, also beside "
                "an int8 base if the extra quant is installed; take a larger machine"
            )
    return not run_plan.misfits


def rates(
    config: ConfigDict, name: str, say: Callable[[str], None], response: int | None = None
) -> Rates:
    """Compute how fast a recipe's stages handle tokens on a machine, of those that costs count. As
    `plan` otherwise.

    Raises ValueError too where the recipe does not fit the machine.
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
    """Set the environment and make the compiler for the machine of this name."""
    machine = topology(name)
    from g2d_jax.plan import target

    target.prepare(machine)
    from g2d_jax.plan import planning
    from g2d_jax.stages import run_stages

    check.checked(settings)
    return planning.Compiler(machine, say)
