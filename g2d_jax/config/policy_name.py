"""The names of policies, parsed in this file alone.

init                       the pretrained model, or random parameters
STAGE, STAGE@STEP          the policy of a stage of this run, at its end or at a step
run:WORKDIR#STAGE[@STEP]   the same of another run
hf:PATH                    a Hugging Face folder, or a hub id
"""

from __future__ import annotations

from dataclasses import dataclass, replace

INIT, OF_STAGE, OF_RUN, OF_MODEL = "init", "", "run:", "hf:"


@dataclass(frozen=True, slots=True)
class PolicyName:
    """The parts of a policy's name. str() returns the name.

    origin: INIT, OF_STAGE, OF_RUN or OF_MODEL. place: the other run's work directory, or the
    model's path or hub id. stage: in this run or the other, "" if no stage trained it. step: the
    text after "@", None for the stage's end. `number` checks that the step is a number; the caller
    checks that the stage exists.
    """

    origin: str
    place: str = ""
    stage: str = ""
    step: str | None = None

    @classmethod
    def parse(cls, name: str) -> PolicyName:
        """Parse a name."""
        if name == INIT:
            return cls(INIT)
        if name.startswith(OF_MODEL):
            return cls(OF_MODEL, name.removeprefix(OF_MODEL))
        if name.startswith(OF_RUN):
            # The last "#": the path of a work directory may contain one.
            place, _, last = name.removeprefix(OF_RUN).rpartition("#")
            return cls(OF_RUN, place, *_stage_and_step(last))
        return cls(OF_STAGE, "", *_stage_and_step(name))

    @property
    def is_model(self) -> bool:
        """True if its weights are a model's, not a checkpoint's."""
        return self.origin in (INIT, OF_MODEL)

    @property
    def is_external(self) -> bool:
        """True if it is from outside this run."""
        return self.origin in (OF_RUN, OF_MODEL)

    @property
    def own_stage(self) -> str:
        """The stage of this run that trains it, "" for none."""
        return self.stage if self.origin == OF_STAGE else ""

    @property
    def number(self) -> int | None:
        """The step as a number, None for the stage's end. Raises ValueError if it is not a
        number."""
        if self.step is None:
            return None
        if not self.step.isdecimal():
            raise ValueError(
                f"policy {str(self)!r}: write the step after @ as a number, as in {self.stage}@20"
            )
        return int(self.step)

    def without_place(self) -> PolicyName:
        """Return the name without the path of its run or model."""
        return replace(self, place="")

    def __str__(self) -> str:
        if self.origin in (INIT, OF_MODEL):
            return f"{self.origin}{self.place}"
        hash_sign = "#" * (self.origin == OF_RUN)
        name = f"{self.origin}{self.place}{hash_sign}{self.stage}"
        if self.step is None:
            return name
        return f"{name}@{self.step}"


def _stage_and_step(text: str) -> tuple[str, str | None]:
    stage, at, step = text.partition("@")
    if not at:
        return stage, None
    return stage, step


def own_stage(name: str) -> str:
    """Return the stage of this run that trains the policy of this name, "" for none."""
    return PolicyName.parse(name).own_stage


def is_external(name: str) -> bool:
    """Return whether the policy of this name is from outside this run."""
    return PolicyName.parse(name).is_external
