"""Settings of the engine that draws responses."""

from __future__ import annotations

from typing import Literal

from g2d_jax.config.choices import Concurrency, FilePath, Retries, Timeout
from g2d_jax.config.section import Section


class Engine(Section):
    """Says what draws responses: the library's own sampler, or an OpenAI-style server as vLLM is
    one (docs/engines.md).

    sync: how policies get to the server: "none" (it serves the only one that is sampled from),
    "folder" (vLLM reloads its weights from one), or "adapter" (vLLM loads the adapters beside its
    model).
    """

    kind: Literal["sampler", "server"] = "sampler"
    url: str = ""  # of a server: the base of its API, as in "http://localhost:8000/v1"
    model: str = ""  # the name that the server has for its model; "": the only one that it lists
    sync: Literal["none", "folder", "adapter"] = "none"
    folder: FilePath = (
        ""  # where policies are written for the server, which sees it too; "": WORKDIR/engine
    )
    api_key_env: str = "VLLM_API_KEY"  # the environment variable that holds the key
    timeout: Timeout = 600.0  # seconds of one attempt
    retries: Retries = 5
    concurrency: Concurrency = 64  # requests under way, of each process

    @property
    def is_server(self) -> bool:
        """True if a server samples."""
        return self.kind == "server"
