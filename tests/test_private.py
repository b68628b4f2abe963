"""The day a library moves one of the names in private.py, these tests say which."""

import zlib
from pathlib import Path

import pytest
import sympy
import unofficial

from g2d_jax.runtime import private, processes

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent


def test_jax_has_a_record_of_its_processes_and_a_store() -> None:
    from jax._src.lib import _jax

    state = private.coordination()
    assert (
        state.client is None and state.num_processes in (None, 1) and state.process_id in (None, 0)
    )
    used = {"key_value_set", "key_value_dir_get", "key_value_delete", "blocking_key_value_get"}
    assert used <= set(dir(_jax.DistributedRuntimeClient))


def test_jax_executes_and_keeps_programs_through_what_is_named_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jax._src import compilation_cache, compiler
    from jax._src.interpreters import pxla

    assert {"name", "device_list", "backend"} <= set(pxla.UnloadedMeshExecutable.__slots__)
    assert (
        callable(pxla.UnloadedMeshExecutable.build_unsafe_call) and compiler.compile_or_get_cached
    )
    unofficial.prefer_zstandard(monkeypatch)
    with private.programs_compressed_by_zlib():
        assert compilation_cache.compress_executable(b"program") == zlib.compress(b"program")
    with pytest.raises(AttributeError):
        compilation_cache.compress_executable(b"program")


def test_a_pod_of_its_own_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    processes.initialise()  # JAX would warn that it needs the package kubernetes
    assert processes.count() == 1


def test_sympy_tells_what_it_knows_of_a_float() -> None:
    # 0, of which no digit is certain
    nothing = (sympy.sin(1) ** 2 + sympy.cos(1) ** 2 - 1).evalf(30)
    assert private.precision(sympy.Float(1, 30)) > 90 and private.precision(nothing) == 1


def test_names_that_only_tests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    unofficial.pretend_cudnn(monkeypatch)
    assert unofficial.cudnn.cuda_versions.cudnn_get_version() >= 90_000
    assert unofficial.compiler.distributed.global_state.process_id == 0


def test_no_other_file_reads_jaxs_own() -> None:
    files = [
        file
        for folder in ("g2d_jax", "tests", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
    ]
    wanted = "jax." + "_src"
    assert {file.name for file in files if wanted in file.read_text()} == {
        "private.py",
        "unofficial.py",
        "test_private.py",
    }
