"""Settings of the whole suite, made before JAX is imported: CPU, 8 simulated devices, no network,
strict arithmetic."""

import ctypes
import gc
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

# tiny.py has a reward function that is named by import path
sys.path.append(str(Path(__file__).parent))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
_CACHES = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
os.environ.setdefault("HF_HOME", str(_CACHES / "huggingface"))  # not moved by what is next
_OWN = tempfile.TemporaryDirectory(prefix="g2d-tests-")
os.environ["XDG_CACHE_HOME"] = _OWN.name  # g2d_jax.runtime.program_cache keeps programs there
_COMPILED_SOON = [  # the suite's time is compilation
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if version("jaxlib").startswith(
    "0.10."
):  # 0.12 has the flag no longer, and ends the process for it
    _COMPILED_SOON += ["--xla_cpu_use_fusion_emitters=false"]
_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    # see g2d_jax.runtime.flags.order_collectives
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    *_COMPILED_SOON,
]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()
os.environ.setdefault("NPROC", "32")  # see g2d_jax.runtime.flags.spare_threads

import examples  # noqa: E402, F401 (registers the profiles)
import fsspec  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from etils import epath  # noqa: E402
from forks import Forks  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from object_store import gs_server  # noqa: E402
from once import once, root  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("third")


# bytes that a process of tests may grow by before it forgets what it compiled
_GROWTH = 512 * 2**20
_small = 0  # its resident bytes when it last did


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Keep the process small: JAX holds every program that it compiled, a megabyte each, and the
    suite's are thousands.

    The next call of a function that is needed again traces it, and finds its program in the folder
    of `compiled`.
    """
    global _small
    try:
        return (yield)
    finally:
        if _resident() > _small + _GROWTH:
            jax.clear_caches()
            gc.collect()
            _give_back()
            _small = _resident()


def _resident() -> int:
    """Return the bytes of this process that lie in memory; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _give_back() -> None:
    """Return free memory to the system, which glibc alone does only for what lies at the heap's
    end."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Bucket(MemoryFileSystem):
    """An object store as fsspec presents one: whole objects, no append, no folders."""

    protocol = "s3"
    store: dict = {}  # noqa: RUF012 (the base class keeps its objects so)
    pseudo_dirs: list = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + str(path).removeprefix("s3://").strip("/")


@pytest.fixture
def bucket() -> epath.Path:
    """An empty folder on an object store held in memory. One class for all tests: etils keeps the
    first it finds."""
    _Bucket.store.clear()
    fsspec.register_implementation("s3", _Bucket, clobber=True)
    return epath.Path("s3://bucket/data")


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the problems that the configs of SmolLM2 need."""
    folder = tmp_path / "models" / "smollm2"
    (folder / "stories").mkdir(parents=True)
    row = '{"problem": "1+1", "answer": "2", "prompt": "1+1", "completion": "2"}\n'
    for name in ("arithmetic", *(f"stories/{split}" for split in ("train", "dev", "test", "sft"))):
        (folder / f"{name}.jsonl").write_text(row)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process of its own with one device; tests/tiny.py can be imported there.

    Programs are compiled once for all these processes, also for those of parallel test workers.
    """
    tests = Path(__file__).parent
    return {
        **os.environ,
        "XLA_FLAGS": " ".join(_COMPILED_SOON),
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
        "JAX_COMPILATION_CACHE_DIR": os.environ.get(
            "JAX_COMPILATION_CACHE_DIR", str(root(tmp_path_factory) / "compiled")
        ),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.fixture(scope="session", autouse=True)
def compiled(one_device: dict[str, str]) -> None:
    """Programs are compiled once for the session: by all workers, and again by none that has
    forgotten its own."""
    jax.config.update("jax_compilation_cache_dir", one_device["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # whether there is a folder is decided once, by the first program
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def process(one_device: dict[str, str]) -> Iterator[ProcessPoolExecutor]:
    """One process with one device for all runs, so that programs are compiled once."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in one_device.items():
                patch.setenv(name, value)
            pool.submit(math.sqrt, 1.0).result()  # it is started with these variables
        yield pool


@pytest.fixture(scope="session")
def forks(one_device: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts processes with one device that have everything imported already."""
    with Forks(one_device, tmp_path_factory.mktemp("forked")) as forks:
        yield forks


@pytest.fixture(scope="session")
def finished(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work directory of tiny.py, run to its end by `g2d run`. Read it only: it is that of all
    tests."""

    def make(folder: Path) -> None:
        tiny = Path(__file__).parent / "tiny.py"
        done = forks.run("run", "--config", tiny, "--workdir", "work", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "work directory: work\n" in done.stdout and "report: " in done.stdout

    return once(tmp_path_factory, "finished", make) / "work"


@pytest.fixture(scope="module")
def gs() -> Iterator[dict[str, str]]:
    """The environment variables that lead to a server with an empty bucket, see object_store.py."""
    with gs_server() as variables:
        yield variables
