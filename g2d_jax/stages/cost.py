"""The cost of a stage: tokens, FLOPs and seconds, carried across restarts in its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOKENS = ("generated", "prefilled", "scored", "trained")


@dataclass(slots=True)
class Cost:
    """The cost of a stage so far.

    seconds: on the clock, without writing checkpoints. device_seconds: times the devices that it used. The
    seconds of each of accounting.ACTIVITIES are parts of seconds, but for checkpointing, which comes on top.
    """

    seconds: float = 0.0
    device_seconds: float = 0.0
    generated: int = 0
    prefilled: int = 0
    scored: int = 0
    trained: int = 0
    flops: float = 0.0
    verifier_cpu_seconds: float = 0.0
    generation_seconds: float = 0.0
    verification_seconds: float = 0.0
    logprobs_seconds: float = 0.0
    training_seconds: float = 0.0
    checkpointing_seconds: float = 0.0
    compilation_seconds: float = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the cost in a manifest, or in a part of one."""
        for name, amount in {**record, **record.get("tokens", {})}.items():
            if name in self.__slots__:
                setattr(self, name, getattr(self, name) + amount)

    def parts(self, share: float) -> dict[str, float]:
        """Return a share of it, for `add`; whole tokens are rounded."""
        fields = dataclasses.asdict(self).items()
        return {name: round(x * share) if isinstance(x, int) else x * share for name, x in fields if x}

    def manifest(self) -> dict[str, Any]:
        """Return the fields of a stage's manifest that state its cost."""
        values = dataclasses.asdict(self)
        tokens = {name: values.pop(name) for name in TOKENS}
        return {**values, "tokens": tokens}
