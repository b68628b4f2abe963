"""The types of settings that several sections share: choices, bounds, and texts that name
places."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from g2d_jax.config.section import Bounds, Place

Dtype = Literal["float32", "bfloat16"]
Split = Literal["dev", "test"]
SamplingWeights = Literal["", "int8"]
Tokens = Literal["generated", "prefilled", "scored", "trained", "tokens"]
Measure = Literal[Tokens, "flops", "seconds", "device_seconds", "verifier_cpu_seconds"]

NotNegativeFloat = Annotated[float, Bounds(least=0, below=math.inf)]

# Of servers that are asked: beyond these a run would hang, or take all connections of this machine,
# and not say why.
Timeout = Annotated[
    float,
    Bounds(above=0, most=86_400, why="seconds, a day at most, after which a server is given up"),
]
Retries = Annotated[int, Bounds(least=0, most=100, why="further attempts of one request")]
Concurrency = Annotated[
    int, Bounds(least=1, most=4096, why="each request under way takes a thread and a connection")
]

# Texts that may name a file or folder: places.py makes them absolute.
FilePath = Annotated[str, Place("path")]
ModelPath = Annotated[str, Place("model")]
ProblemsPath = Annotated[str, Place("problems")]
Policy = Annotated[str, Place("policy")]
Policies = Annotated[tuple[str, ...], Place("policy")]
Rollouts = Annotated[str, Place("rollouts")]
Preferences = Annotated[str, Place("preferences")]
