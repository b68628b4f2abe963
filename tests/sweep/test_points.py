"""From a config with a study to its points."""

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from g2d_jax import config as settings
from g2d_jax.config.io import from_dict, to_dict
from g2d_jax.recipes.config_load import resolve
from g2d_jax.sweep.points import points, refuse_decided, with_axes

TINY = str(Path(__file__).parents[1] / "tiny.py")


def study(seeds: tuple[int, ...] = (), **arms: ConfigDict) -> ConfigDict:
    config = resolve(TINY)
    config.unlock()
    config.sweep = settings.sweep(seeds=seeds, arms=arms)
    return config.lock()


def test_product_zip_and_seeds_are_multiplied_out() -> None:
    arm = settings.arm(
        fixed=("stages.dpo.beta=0.5",),
        product=("stages.warmup.steps=1,3",),
        zip=("stages.dpo.epochs=1,2", "stages.collect.pairs_per_prompt=4,2"),
    )
    studied = points(study((7, 8), main=arm))
    assert [point.label for point in studied[:4]] == [
        "warmup.steps=1,dpo.epochs=1,collect.pairs_per_prompt=4,seed=7",
        "warmup.steps=1,dpo.epochs=2,collect.pairs_per_prompt=2,seed=7",
        "warmup.steps=3,dpo.epochs=1,collect.pairs_per_prompt=4,seed=7",
        "warmup.steps=3,dpo.epochs=2,collect.pairs_per_prompt=2,seed=7",
    ]
    assert len(studied) == 8 and {point.seed for point in studied} == {7, 8}
    last = studied[-1].config
    assert (last.seed, last.stages.warmup.steps, last.stages.dpo.epochs, last.stages.dpo.beta) == (
        8,
        3,
        2,
        0.5,
    )
    assert last.stages.collect.pairs_per_prompt == 2 and "sweep" not in last


def test_arms_keep_their_stages_and_name_their_points_with_labels_that_are_safe_as_folders() -> (
    None
):
    few = settings.arm(
        stages=("sft", "warmup", "evaluate"),
        fixed=("stages.evaluate.policies=sft,warmup",),
        product=(),
    )
    both = points(study((), g2d=settings.arm(), grpo=few))
    assert [point.label for point in both] == ["g2d,seed=0", "grpo,seed=0"]
    assert set(both[1].config.stages) == {"sft", "warmup", "evaluate"}
    lists = settings.arm(
        product=("stages.evaluate.pass_at=(1,2),[1]", "tokenizer.prompt_template=a/{problem},plain")
    )
    odd = points(study(main=lists))
    assert [tuple(point.config.stages.evaluate.pass_at) for point in odd] == [
        (1, 2),
        (1, 2),
        (1,),
        (1,),
    ]
    assert all("/" not in point.label and "{" not in point.label for point in odd)
    assert len({point.label for point in odd}) == 4


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (
            {"product": ("stages.warmup.stepz=1,2",)},
            "main: unknown field 'stages.warmup.stepz', did you mean",
        ),
        (
            {"product": ("stages.warmup.steps=one",)},
            "sweep.arms.main: stages.warmup.steps must be an integer",
        ),
        ({"product": ("stages.warmup.steps",)}, "has no values"),
        ({"zip": ("stages.dpo.epochs=1,2", "stages.dpo.beta=1")}, "equally many values"),
        ({"stages": ("sft", "warm")}, "no stage 'warm', did you mean warmup"),
        ({"product": ("stages.dpo.beta=1,1",)}, "twice"),
        ({"product": ("seed=0,1",)}, "set seeds with sweep.seeds or --seeds"),
        ({"fixed": ("config.name=mine",)}, "names are automatic"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    arm: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        points(study(main=settings.arm(**arm)))


def test_axes_from_the_command_line() -> None:
    made = with_axes(resolve(TINY), ["stages.warmup.steps=1,3"], [], (4, 5))
    assert [point.seed for point in points(made)] == [4, 4, 5, 5]
    assert [point.seed for point in points(with_axes(resolve(TINY), [], [], (1, 2)))] == [1, 2]
    with pytest.raises(ValueError, match="nothing varies"):
        with_axes(resolve(TINY), [], [], ())
    with pytest.raises(ValueError, match="has arms of its own"):
        with_axes(study(main=settings.arm()), ["stages.warmup.steps=1"], [], ())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("config.seed=3", r"the study runs its seeds, 1, 2.*ignores config\.seed=3: give --seeds"),
        ("stages.warmup.steps = 77", r"every arm of the study sets stages\.warmup\.steps"),
        ("stages.dpo.beta=0.5", ""),  # one arm of two sets it
        ("config.seeds=3", ""),
    ],
)
def test_an_override_that_no_point_would_have_is_refused(override: str, message: str) -> None:
    arms = {
        "g2d": settings.arm(product=("stages.warmup.steps=1,3",), fixed=("stages.dpo.beta=0.1",)),
        "grpo": settings.arm(zip=("config.stages.warmup.steps=5,7",)),
    }
    config = study((1, 2), **arms)
    if not message:
        refuse_decided(config, [override])
        return
    with pytest.raises(ValueError, match=message):
        refuse_decided(config, [override])


def test_a_study_survives_its_file() -> None:
    config = study((1, 2), grpo=settings.arm(product=("stages.warmup.steps=0,3",)))
    again = from_dict(to_dict(config))
    assert [point.label for point in points(again)] == [point.label for point in points(config)]
    with pytest.raises(ValueError, match=r"sweep.arms.grpo.prodct"):
        from_dict({**to_dict(config), "sweep": {"arms": {"grpo": {"prodct": []}}}})
