"""Settings of the whole suite: strict dtype promotion, one small thread pool, shared data paths."""

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

# Before JAX is imported anywhere.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Most graphs take longer to compile well than to run: a third of the suite. See `shipped_compilations`.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Hundreds of processes that tests start would each compile this project's sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest

_ENVIRONMENT = dict(os.environ)
_WORTH_KEEPING_S = 0.05
_MOST_MAPPINGS = 25_000


pytest_plugins = ["tests.budgets"]

# Environments for formats and accelerators do without it.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    # A loaded machine takes longer than any limit of an example.
    settings.register_profile("jaxllm", deadline=None)
    settings.load_profile("jaxllm")


def pytest_collection_finish() -> None:
    """Leaves what collecting has made out of every later collection of garbage: thousands of tests, and the
    modules that they import, which are there to the end."""
    # Else processes that tests start would compile in another way than this one.
    changed = [
        name
        for name, value in os.environ.items()
        if name.startswith("JAX") and _ENVIRONMENT.get(name) != value
    ]
    assert not changed, f"importing a test changed {changed}; set it in a fixture"
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared folders go to a directory of this run, never to the user's, and graphs are not kept.

    A graph from disk would hide what a test changes in the code that makes it; those tests that are about
    kept graphs ask for them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(tmp_path_factory.getbasetemp() / "jaxllm-cache"))
        patch.setenv("JAXLLM_BUCKETS_BYTES", "0")
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_compilations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one test compiled, no other test of this run compiles again, in any process: half of the suite's
    time. With JAXLLM_TEST_COMPILATIONS, a folder, which `make test` sets, nor does a later run.

    JAX names a program by all that it is made of: a changed program is another one. The counter of
    compilations counts those that are read, too.
    """
    import jax

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = os.environ.get("JAXLLM_TEST_COMPILATIONS") or str(shared / "compilations")
    settings = {
        "jax_compilation_cache_dir": folder,
        # What takes less is as soon compiled as read.
        "jax_persistent_cache_min_compile_time_secs": _WORTH_KEEPING_S,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield


@pytest.fixture(scope="module")
def shipped_compilations(shared_compilations: None) -> Iterator[None]:
    """Compiles as users do, with every optimization, in processes that tests start as well: for tests of what
    an optimizer may change (answers to the bit), and of graphs that run for long."""
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name.upper(), "0")
        jax.config.update(name, False)
        # What earlier tests left in memory is not optimized.
        jax.clear_caches()
        try:
            yield
        finally:
            jax.config.update(name, before)
            jax.clear_caches()


@pytest.fixture(scope="module")
def own_compilations(shared_compilations: None) -> Iterator[None]:
    """Compiles anew what this module's tests compile from here on: what JAX's own cache gives cannot be kept
    in ours."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    name = "jax_enable_compilation_cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name.upper(), "0")
        jax.config.update(name, False)
        compilation_cache.reset_cache()
        # What earlier tests left in memory came from there, too.
        jax.clear_caches()
        try:
            yield
        finally:
            jax.config.update(name, True)
            compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def bounded_mappings() -> Iterator[None]:
    """Drops what JAX has compiled where a process of many tests nears the number of mappings that Linux
    allows, 65,530: XLA does not survive one that is refused."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real models and texts; tests that need them skip where they are missing."""
    folder = Path(os.environ.get("JAXLLM_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("real data is not here; set JAXLLM_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def stories_folder(data_dir: Path) -> Path:
    """The real stories260K model as a Hugging Face folder."""
    folder = data_dir / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing")
    return folder


@pytest.fixture
def compiles() -> Callable[[], AbstractContextManager[Callable[[], int]]]:
    """Counts XLA compilations: `with compiles() as count: ...; count()`."""
    import jax

    @contextlib.contextmanager
    def counting() -> Iterator[Callable[[], int]]:
        seen: list[str] = []

        def listen(event: str, duration: float, **_: object) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                seen.append(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield lambda: len(seen)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return counting
