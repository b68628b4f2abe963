"""What tests alone need of names that JAX does not promise; test_private.py says when one of them
is gone."""

import math
import re
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

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


def watch_compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Return a list of what is compiled from now on: the thread, the program's name, and the bytes
    of its arguments and results, all devices together."""
    found: list[tuple[str, str, int]] = []
    compile_program = compiler.compile_or_get_cached

    def heard(backend: Any, module: Any, *rest: Any, **named: Any) -> Any:
        (signature,) = re.findall(r"func public @main\((.*?)\{\n", str(module), re.DOTALL)
        size = 0.0
        for shape, bits in re.findall(r"tensor<((?:\d+x)*)[a-wyz]+(\d+)>", signature):
            size += math.prod(map(int, shape.split("x")[:-1])) * int(bits) / 8
        name = module.operation.attributes["sym_name"].value.removeprefix("jit_")
        found.append((threading.current_thread().name, name, int(size)))
        return compile_program(backend, module, *rest, **named)

    monkeypatch.setattr(compiler, "compile_or_get_cached", heard)
    return found
