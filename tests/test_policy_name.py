"""Names of policies and their parts."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from g2d_jax.config.policy_name import PolicyName, is_external, own_stage


@pytest.mark.parametrize(
    ("name", "place", "stage", "step", "number"),
    [
        ("init", "", "", None, None),
        ("dpo", "", "dpo", None, None),
        ("warmup@20", "", "warmup", "20", 20),
        ("run:runs/a#dpo", "runs/a", "dpo", None, None),
        ("run:gs://bucket/a@b#c#warmup@3", "gs://bucket/a@b#c", "warmup", "3", 3),
        ("hf:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "", None, None),
        ("hf:a@b#c", "a@b#c", "", None, None),
    ],
)
def test_parts(name, place, stage, step, number):
    parsed = PolicyName.parse(name)
    assert (parsed.place, parsed.stage, parsed.step, parsed.number) == (place, stage, step, number)
    assert str(parsed) == name
    assert parsed.is_model == (name == "init" or name.startswith("hf:"))
    assert is_external(name) == (":" in name)
    assert own_stage(name) == ("" if ":" in name else stage)
    assert str(parsed.without_place()) == name.replace(place, "")


@pytest.mark.parametrize("step", ["", "x", "-1", "1.5", "²"])
def test_a_step_that_is_no_number_is_kept_and_refused_when_it_is_needed(step):
    parsed = PolicyName.parse(f"warmup@{step}")
    assert str(parsed) == f"warmup@{step}"
    with pytest.raises(ValueError, match=r"write the step after @ as a number, as in warmup@20"):
        _ = parsed.number


@given(st.text())
@examples(100)
def test_any_text_of_this_run_or_a_model_comes_back_as_it_was(text):
    for name in (text, f"hf:{text}", f"run:{text}#stage", f"run:{text}#stage@4"):
        parsed = PolicyName.parse(name)
        if not name.startswith("run:") or "#" in name:
            assert str(parsed) == name
