"""Compiled programs are kept and taken again, whatever was left of a writer, and nothing but their
time changes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import unofficial
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from g2d_jax.runtime import program_cache

pytestmark = pytest.mark.quick

HITS, MISSES = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


@pytest.fixture(autouse=True)
def keep_all() -> Iterator[None]:
    """Programs that compile within a second are kept too; no folder is set before."""
    names = {"jax_persistent_cache_min_compile_time_secs": 0.0, program_cache.CACHE: None}
    before = {name: getattr(jax.config, name) for name in names}

    def use(settings: dict[str, object]) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # the other tests have a folder

    use(names)
    yield
    use(before)


def compiled() -> tuple[bytes, list[str]]:
    """What a program gives when a new process would compile it, and what became of it in the
    cache."""
    seen: list[str] = []
    listener = lambda event, **_: seen.append(event) if event in (HITS, MISSES) else None  # noqa: E731
    jax.clear_caches()
    jax.monitoring.register_event_listener(listener)
    try:
        x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
        found = jax.jit(lambda x: jnp.tanh(x @ x.T).sum(axis=0))(x)
        return np.asarray(found).tobytes(), seen
    finally:
        jax.monitoring.unregister_event_listener(listener)


def entries(folder: epath.Path) -> list[epath.Path]:
    return [path for path in folder.iterdir() if path.name.endswith("-cache")]


@contextmanager
def cached_in(folder: os.PathLike[str]) -> Iterator[None]:
    jax.config.update(program_cache.CACHE, os.fspath(folder))
    with program_cache.cached():
        yield
    jax.config.update(program_cache.CACHE, None)
    compilation_cache.reset_cache()


def test_the_second_start_compiles_nothing(tmp_path: Path):
    fresh, seen = compiled()
    assert not seen
    with cached_in(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled() == (fresh, [MISSES])
        assert compiled() == (fresh, [HITS])
    with cached_in(tmp_path):
        assert compiled() == (fresh, [HITS])
    assert compiled() == (fresh, [])


def test_an_object_store(bucket: epath.Path):
    with cached_in(bucket):
        fresh, seen = compiled()
        assert seen == [MISSES] and len(entries(bucket)) == 1
        assert compiled() == (fresh, [HITS])


def damaged(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    """Check that a damaged entry is compiled again, with a warning, at each start."""
    with cached_in(folder):
        fresh, _ = compiled()
        (entry,) = entries(epath.Path(folder))
        whole = entry.read_bytes()
        entry.write_bytes(damage(whole))
        assert entry.read_bytes() != whole
        for _ in range(2):
            with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
                assert compiled() == (fresh, [MISSES])
        entry.unlink()
        assert compiled() == (fresh, [MISSES])
        assert compiled() == (fresh, [HITS])


@pytest.mark.parametrize("left", [0, 1, 2, 32, 0.5, 0.99])
def test_an_entry_that_is_cut_off_is_compiled_again(tmp_path: Path, left: float) -> None:
    damaged(tmp_path, lambda data: data[: left if isinstance(left, int) else int(left * len(data))])


@pytest.mark.parametrize("place", [0, 1, 2, 4, 0.2, 0.4, 0.6, 0.8, -5, -1])
def test_a_flipped_byte_is_never_executed(
    tmp_path: Path, place: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where zstandard is installed, which JAX would compress with: it writes no checksum."""
    unofficial.prefer_zstandard(monkeypatch)

    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[place if isinstance(place, int) else int(place * len(data))] ^= 0xFF
        return bytes(changed)

    damaged(tmp_path, flip)


def test_which_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    jax.config.update(program_cache.CACHE, str(tmp_path / "jax"))
    with program_cache.cached(epath.Path(tmp_path / "work")):
        assert getattr(jax.config, program_cache.CACHE) == str(tmp_path / "jax")
    assert getattr(jax.config, program_cache.CACHE) == str(tmp_path / "jax")
    part = program_cache.machine()
    assert part.startswith("cpu-")
    jax.config.update(program_cache.CACHE, None)
    with program_cache.cached():
        assert getattr(jax.config, program_cache.CACHE) == str(
            tmp_path / "home/g2d_jax/compiled" / part
        )
    assert getattr(jax.config, program_cache.CACHE) is None
    monkeypatch.setattr(jax, "process_count", lambda: 2)  # only a folder that they share is of use
    for shared, expected in (
        (None, None),
        (epath.Path(tmp_path / "work"), str(tmp_path / "work" / part)),
    ):
        with program_cache.cached(shared):
            assert getattr(jax.config, program_cache.CACHE) == expected


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with (
        pytest.warns(UserWarning, match="compiled programs are not cached"),
        program_cache.cached(),
    ):
        assert getattr(jax.config, program_cache.CACHE) is None


TRIED = """
import os, sys
from pathlib import Path
from g2d_jax.runtime import flags
root = Path(sys.argv[1])
def platforms(**variables):
    os.environ.pop("JAX_PLATFORMS", None)
    os.environ.update(variables)
    flags.leave_tpu_out(str(root))
    for name in variables:
        del os.environ[name]
    return os.environ.get("JAX_PLATFORMS")
print(platforms(), platforms(TPU_SKIP_MDS_QUERY="1"), platforms(TPU_NAME="mine"), platforms(JAX_FORCE_TPU_INIT="1"))
vendor = root / "sys/bus/pci/devices/0000:00:04.0/vendor"
vendor.parent.mkdir(parents=True)
vendor.write_text("0x8086\\n")
print(platforms())
vendor.write_text("0x1ae0\\n")
print(platforms())
vendor.unlink()
(root / "dev").mkdir()
(root / "dev" / "accel0").touch()
print(platforms())
"""


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is not None, reason="plugins choose for themselves"
)
def test_libtpu_that_is_there_for_plans_is_left_out_where_there_is_no_tpu(tmp_path: Path) -> None:
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    signs = ("JAX_", "TPU_", "LIBTPU_", "PJRT_", "CLOUD_TPU")
    env = {name: value for name, value in os.environ.items() if not name.startswith(signs)}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    (tmp_path / "root").mkdir()
    command = [sys.executable, "-c", TRIED, str(tmp_path / "root")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["cpu cpu None None", "cpu", "None", "None"]
