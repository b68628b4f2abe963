"""The dynamics section: what training did, and how the policy changed meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

from g2d_jax.report import markup, training
from g2d_jax.report.charts import Panel, Series, line_chart
from g2d_jax.report.run import Run
from g2d_jax.report.sections import Metrics, logged_metrics

CHARTS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("Next-token entropy, nats", {"entropy": "entropy"}),
    (
        "Length of responses, tokens",
        {
            "completions/mean_length": "all",
            "completions/mean_length_correct": "correct",
            "completions/mean_length_incorrect": "incorrect",
        },
    ),
    ("Reward", {"reward": "reward", "accuracy": "accuracy"}),
    ("KL divergence from the reference, nats a token", {"kl": "KL"}),
    ("Length in pairs, tokens", {"pairs/chosen_length": "chosen", "pairs/rejected_length": "rejected"}),
    ("Log-probability in pairs, nats", {"logps/chosen": "chosen", "logps/rejected": "rejected"}),
)
"""Title, and metric -> name of its line."""

TELLING = {
    *("completions/mean_length_correct", "completions/mean_length_incorrect", "pairs/chosen_length"),
    *("pairs/rejected_length", "generation/prompts"),
}
"""A stage that logged one of these, or a probe, is in the section; the curves have the others' metrics."""

MEANING = (
    "Lines without further words are of what a stage trained on: rollouts of the policy at its last synchronisation, "
    "or pairs. Fresh samples are of the trained policy itself, on the same prompts with the same random numbers "
    "each time; a stage's cost includes theirs only where they decide its end (stop=adaptive)."
)


def dynamics(run: Run) -> str:
    """What training did, and charts of the stages that logged such things; "" if there is nothing to tell."""
    table = logged_metrics(run)
    stages = [stage for stage in run.stages if stage.kind in ("online", "offline") and _tells(table, stage.name)]
    figures = [
        line_chart(title, [Panel(stage.name, lines) for stage in stages if (lines := _lines(table, stage.name, names))])
        for title, names in CHARTS
        if any(_lines(table, stage.name, names) for stage in stages)
    ]
    return markup.section(
        "dynamics",
        "Dynamics",
        *(markup.table(*one) for one in training.tables(run)),
        markup.paragraph(MEANING if any(figures) else "", "hint"),
        markup.charts(*figures),
    )


def _tells(table: Metrics, stage: str) -> bool:
    return any(at == stage and (kind == "probe" or name in TELLING) for at, kind, name in table)


def _lines(table: Metrics, stage: str, names: Mapping[str, str]) -> list[Series]:
    return [
        Series(label + suffix, *zip(*table[stage, kind, name], strict=True))
        for kind, suffix in (("train", ""), ("probe", ", fresh"))
        for name, label in names.items()
        if (stage, kind, name) in table
    ]
