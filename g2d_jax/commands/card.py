"""The card (README.md) of an exported policy or of published preference pairs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import CardData, RepoCard

from g2d_jax import __version__
from g2d_jax.config import Collect, Config, places
from g2d_jax.config.io import from_dict, to_dict
from g2d_jax.models import hf
from g2d_jax.report import format as fmt
from g2d_jax.report import tables
from g2d_jax.report.frame import Policy
from g2d_jax.report.runs import read_run
from g2d_jax.runtime import storage
from g2d_jax.session.policies import base_path, base_revision
from g2d_jax.session.session import Session
from g2d_jax.session.workdir import without_secrets

WRITTEN_BY = "Written by g2d_jax"
"""Marks a README.md as a card of this library, whose folder may be overwritten."""

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_COSTS = ("generated", "trained", "flops", "seconds")
_LICENCE = re.compile(r"^license: *([\w.-]+)", re.MULTILINE)


def card(session: Session, of: str, *, what: str = "model", note: str = "") -> str:
    """Write the README.md of a policy's model or adapters, or of a collect stage's pairs.

    of: the policy, or the collect stage. what: "model", "adapters" or "pairs". note: on the base of
    adapters, from `base_named`. Local paths are shortened to their last part. A stage with a
    damaged record is left out, with a warning.
    """
    config = Config.of(places.without_folders(from_dict(to_dict(session.config))))
    policy = session.config.stage(of, Collect).policy if what == "pairs" else of
    base = base_path(session, policy)
    library = {"model": "transformers", "adapters": "peft"}.get(what)
    data = CardData(
        library_name=library,
        pipeline_tag=library and "text-generation",
        base_model=base if library and _HUB_ID.fullmatch(base) else None,
        tags=["g2d-jax"],
    )
    filled = RepoCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md.j2")),
        written_by=f"{WRITTEN_BY} {__version__}",
        of=places.without_folder(of, "policy"),
        what=what,
        note=note,
        config=config,
        base=places.last_part(base),
        revision=base_revision(session, policy),
        licence=_licence(session, base),
        rank=hf.greatest_rank(session.model_config) if what == "adapters" else None,
        results=_results(session, policy, of),
        stops=_stops(config),
        tokenizer=session.tokenizer,
        settings=json.dumps(storage.plain(to_dict(config)), indent=2, sort_keys=True),
    )
    return without_secrets(str(filled))


def _licence(session: Session, base: str) -> str:
    """Return the licence that the card of the run's own model names, "" if unknown."""
    if session.model_folder is None or base != session.config.model.path:
        return ""
    readme = session.model_folder / "README.md"
    found = readme.exists() and _LICENCE.search(storage.read_bytes(readme).decode(errors="replace"))
    return found[1] if found else ""


def _results(session: Session, policy: str, of: str) -> str:
    """Tabulate accuracy or reward, and cost, of a policy and of those that the run evaluated; the
    last row is the cost of a collect stage `of`."""
    run = read_run(session.workdir, lenient=True)
    for damage in run.left_out:
        session.tracker.say_once(f"WARNING: {damage}")
    latest = run.latest
    measured = {policy: None, **(latest.by_name if latest else {})}
    rows = []
    for name, entry in measured.items():
        row = {"policy": places.without_folder(name, "policy"), "accuracy %": fmt.UNKNOWN}
        if latest and entry:
            row["accuracy %"] = fmt.spread(entry.accuracy.mean, entry.accuracy.sem_clustered)
            for task in tables.ranked(latest):
                result = entry.tasks[task]
                row[f"reward in {task}"] = fmt.measured(result.reward, result.sem)
        rows.append(row | tables.cost_cells(Policy(run, name).costs, _COSTS))
    if of != policy:
        spent = tables.cost_cells(run.results[of].cost.measures, _COSTS)
        rows.append({"policy": f"the pairs of {of}", **spent})
    title = "Not evaluated"
    if latest:
        over = tables.count_problems(latest, "held-out problems")
        title = f"Mean on {over} ± standard error clustered by problem"
    return tables.markdown(tables.table(f"{title}; tokens, FLOPs and time without SFT", rows))


def _stops(config: Config) -> list[str]:
    """List the stop strings of all stages."""
    strings = set[str]()
    for stage in config.stages.values():
        for sampling in stage.samplings():
            strings.update(sampling.stop)
    return sorted(strings)


def base_named(session: Session, policy: str, *, published: bool) -> tuple[str | None, str]:
    """Return the name by which PEFT loads the base of a policy's adapters, and a note for users.

    The name is None if PEFT would load no base, or one that the adapters do not change; the note is
    "" if none is needed. published: shorten a path to its last part. Raises ValueError for a
    missing base.
    """
    base, revision = base_path(session, policy), base_revision(session, policy)
    shown = places.last_part(base)
    if not base or hf.has_images(hf.resolve(base, revision=revision)):
        return None, (
            f"PEFT cannot apply these adapters to their base, {shown or 'random parameters'}: "
            "export it with `g2d export --policy init`, and load the adapters on that folder."
        )
    if published and shown != base:
        return shown, (
            f"The base of these adapters, {shown}, was a local folder: load that model yourself, and "
            "the adapters on it with PeftModel."
        )
    return base, ""
