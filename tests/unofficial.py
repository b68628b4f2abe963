"""What tests alone need of names that JAX does not promise; test_private.py says when one of them
is gone."""

from types import ModuleType, SimpleNamespace

import pytest
from jax._src import compilation_cache, compiler
from jax._src.cudnn import fused_attention_stablehlo as cudnn


def let_every_process_write_programs() -> None:
    """JAX writes what process 0 compiles to its cache, of which the others can make no use: here
    all write."""
    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))


def pretend_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering for CUDA asks the installed plugin for cuDNN's version: answer where there is
    none."""
    if cudnn.cuda_versions is None:
        monkeypatch.setattr(
            cudnn, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91_000)
        )


def prefer_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have JAX use the package zstandard for the programs that it keeps, as where that is
    installed. Its functions are not there."""
    monkeypatch.setattr(compilation_cache, "zstandard", ModuleType("zstandard"))
