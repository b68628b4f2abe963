"""The inputs of a run, kept by content in its work directory and compared at every start.

    inputs.py: setting -> Content ─┬─► WORKDIR/inputs.json
                                   └─► compared with what earlier starts kept ─► refused

Places are free: what lies elsewhere with the same content is the same. A reward function's file is
only warned about: mending one that failed must not end a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from etils import epath

from g2d_jax.config import Config
from g2d_jax.config.policy_name import OF_RUN, PolicyName
from g2d_jax.contents import Content, difference
from g2d_jax.runtime import storage
from g2d_jax.runtime.lock import awaited
from g2d_jax.session.init_params import base_setting
from g2d_jax.session.inputs import base_model, named, of_run, policy_settings
from g2d_jax.session.policies import base_of
from g2d_jax.session.session import Session
from g2d_jax.workdir import INPUTS, PLANS, absolute, has_begun, read_settings


def check(
    workdir: epath.Path,
    found: Mapping[str, Content],
    say: Callable[[str], None],
    settings: Config,
    begun: bool | None = None,
) -> None:
    """Compare the inputs of a run with those that its work directory keeps, or keep them. For one
    process.

    begun: whether a stage has begun, None to look: before, all may change. Raises ValueError with
    what differs and what to do.
    """
    kept = read(workdir)
    begun = has_begun(workdir) if begun is None else begun
    compare(workdir, found, say, settings, begun)
    if kept is None or any(_entry(kept.get(name)) != _entry(item) for name, item in found.items()):
        keep(workdir, {**(kept or {}), **found} if begun else found)


def compare(
    workdir: epath.Path,
    found: Mapping[str, Content],
    say: Callable[[str], None],
    settings: Config,
    begun: bool,
) -> None:
    """Raise ValueError as `check` does; write nothing."""
    _require_bases_of_others(found, settings)
    kept = read(workdir)
    if not begun or kept is None:
        return
    changed = list(_differences(kept, found, say))
    if changed:
        raise ValueError(refusal(workdir, changed))


def _require_bases_of_others(found: Mapping[str, Content], settings: Config) -> None:
    """Raise ValueError where adapters of another run would stand beside another model than they
    were trained with."""
    for name, stage in settings.stages.items():
        for setting, policy in policy_settings(name, stage).items():
            if f"{setting}.base" in found:
                _require_base_of_other(setting, policy, found[f"{setting}.base"])


def _require_base_of_other(setting: str, policy: str, base: Content) -> None:
    """Raise ValueError where a base is not the model that another run's adapters were trained with,
    which it keeps."""
    named_policy = PolicyName.parse(policy)
    other = absolute(named_policy.place)
    theirs = Config.of(read_settings(other)[0])
    name = base_setting(theirs, named_policy.stage)
    kept = (read(other) or {}).get(name)
    if kept is not None and difference(kept, base):
        raise ValueError(
            f"{setting}: the adapters of {policy} stand beside another model than {base.place} now "
            f"holds: {difference(kept, base)}. Put back the model that "
            "they were trained with, or export that policy and use hf:FOLDER"
        )


def check_hub(root: epath.Path, session: Session) -> None:
    """Compare what a study reads from the hub with what its directory keeps of it, by name and
    revision, or keep it.

    The names of a study's stages have no more of it than that, for it may not have been here when
    they were made.
    """
    found = {}
    for name, reader in of_run(session).items():
        if reader.is_on_hub:
            found[f"{name} {reader.place}@{reader.revision or ''}"] = reader.content()
    if found:
        check_shared(root, found, session.tracker.say, session.config)


def check_shared(
    root: epath.Path, found: Mapping[str, Content], say: Callable[[str], None], settings: Config
) -> None:
    """Compare contents with those that the directory of a study keeps, or keep them, one process at
    a time."""
    with awaited(root / PLANS):
        check(root, found, say, settings, begun=read(root) is not None)


def changed_functions(workdir: epath.Path, found: Mapping[str, Content]) -> list[str]:
    """List the reward functions whose file is not as a work directory keeps it, with what
    differs."""
    changes = _changes(read(workdir) or {}, found)
    return [line for name, line in changes if "reward.function" in name]


def refusal(workdir: epath.Path, changed: list[str]) -> str:
    """Return the message for inputs that are not what a run began with."""
    return "\n  ".join([f"{workdir} was made with other inputs:", *changed]) + (
        "\nPut them back as they were (where they lie does not matter: settings may name another "
        "place, and with revision= a commit of the hub), or choose another --workdir"
    )


def _differences(
    kept: Mapping[str, Content], found: Mapping[str, Content], say: Callable[[str], None]
) -> Iterator[str]:
    """Yield a line for each input that is not as it was; of a reward function's file it is only
    said."""
    for name, line in _changes(kept, found):
        if "reward.function" in name:
            say(f"WARNING: {line}. Rewards from now on may not be those of earlier stages")
        else:
            yield line


def _changes(
    kept: Mapping[str, Content], found: Mapping[str, Content]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each input that is not as it was, and a line about it."""
    for name, new in found.items():
        if name in kept and (line := difference(kept[name], new)):
            place = f" ({new.place})" if new.place else ""
            yield name, f"{name}{place}: {line}"


def _entry(item: Content | None) -> dict[str, object]:
    """Return what inputs.json has of an input."""
    if item is None:
        return {}
    values = {
        "kind": item.kind,
        "digest": item.digest,
        "count": item.count,
        "commit": item.commit,
        "place": item.place,
    }
    return {key: value for key, value in values.items() if value != ""}


def keep(workdir: epath.Path, found: Mapping[str, Content]) -> None:
    """Write inputs.json."""
    storage.write_json(workdir / INPUTS, {name: _entry(item) for name, item in found.items()})


def read(workdir: epath.Path) -> dict[str, Content] | None:
    """Read what a work directory keeps of its inputs; None where it keeps nothing."""
    file = workdir / INPUTS
    if not file.exists():
        return None
    try:
        return {name: Content(**entry) for name, entry in storage.read_json(file).items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged: {error}. Delete it, and contents are kept anew"
        ) from error


# Commands on a run


def verify(session: Session, policy: str, *settings: str) -> None:
    """Compare the tokenizer, what a policy is made of and some further inputs with what the run
    keeps of them.

    Raises ValueError where they differ: adapters beside another base, for one, would be another
    policy.
    """
    kept = read(session.workdir) or {}
    every = named(session)
    wanted = ["tokenizer", *settings, *_under(session, policy)]
    if session.config.lora.rank and (base := base_model(session.config, base_of(session, policy))):
        if PolicyName.parse(policy).origin == OF_RUN:
            _require_base_of_other("policy", policy, base.content())
        wanted.append(base_setting(session.config, policy))
        every.setdefault(wanted[-1], base)
    found = {}
    for name in wanted:
        if name in kept and name in every and name not in found:
            found[name] = every[name].content()
    changed = list(_differences(kept, found, session.tracker.say))
    if changed:
        raise ValueError(refusal(session.workdir, changed))


def _under(session: Session, policy: str) -> Iterator[str]:
    """Yield the settings of the weights that loading a policy reads beside the run's own
    checkpoints."""
    loaded = {policy}
    if session.config.lora.rank:
        loaded.add(base_of(session, policy))
    if "init" in loaded:
        yield "model.path"
    for name, stage in session.config.stages.items():
        for setting, other in policy_settings(name, stage).items():
            if other in loaded:
                yield setting
