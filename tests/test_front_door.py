"""The package in other programs: public names, the base install, a host's settings of JAX, entry points."""

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import jaxllm
from jaxllm.client import Client
from jaxllm.contexts.codecs import CODECS, Codec, find_codec
from jaxllm.errors import ConfigError
from jaxllm.host_settings import own_jax_settings, require_usable_jax
from jaxllm.models.architectures import ARCHITECTURES, architecture
from jaxllm.registry import is_added
from jaxllm.serving.contexts.record import Origin, Record, decoded, encoded
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.speculation.drafters import DRAFTERS, make_drafter
from jaxllm.tasks import TASKS, Task, find_task
from tests.serving.server.daemons import MAIN, Process
from tests.tiny import write_tiny_folder

SOURCE = ast.parse(Path(jaxllm.__file__).read_text(encoding="utf-8"))
IMPORTED = """
import sys
import jaxllm
print(*sorted({name.split(".")[0] for name in sys.modules} & {"jax", "numpy", "flax"}))
print(*sorted(name for name in sys.modules if name.startswith("jaxllm.") and name != "jaxllm.version"))
"""


@pytest.mark.parametrize("name", jaxllm.__all__)
def test_a_public_name_is_defined_where_the_list_says(name: str) -> None:
    home = jaxllm._HOMES[name]
    value = getattr(jaxllm, name)
    assert value is getattr(importlib.import_module(home), name)
    # Else a type would be named after a module that only passes it on.
    assert getattr(value, "__module__", home) == home


def test_all_lists_agree() -> None:
    typed = {
        alias.name: node.module
        for block in SOURCE.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == jaxllm._HOMES
    assert set(dir(jaxllm)) == {*jaxllm.__all__, "__version__"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


# Without the packages of the extra `train` everything but training works, and training names the extra.

BLOCKED = "import sys; sys.modules.update(dict.fromkeys(('flax', 'optax', 'orbax', 'chex')))\n"
PREPARED = """
import jaxllm
from jaxllm.prepare import prepare
prepare(sys.argv[1], sys.argv[2])
options = jaxllm.EngineOptions(context_tokens=64, cache_tokens=(64,), chunk_tokens=(16,), buckets_bytes=0)
engine = jaxllm.Engine.open(sys.argv[2], options=options)
print(len(engine.generate("hello", jaxllm.GenerationConfig(max_tokens=4, ignore_eos=True)).tokens))
"""


def without_training(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_it_prepares_answers_and_serves(tmp_path: Path) -> None:
    folder, bundle = write_tiny_folder(tmp_path / "model"), tmp_path / "tiny.jaxllm"
    done = without_training(PREPARED, folder, bundle)
    assert (done.stdout.strip(), done.stderr) == ("4", "")
    path, config = tmp_path / "s", tmp_path / "service.toml"
    config.write_text("context_tokens = 64\nbatch_rows = []\n")
    options = ("--model", bundle, "--socket", path, "--config", config)
    service = Process(tmp_path, *options, script=BLOCKED + MAIN)
    try:
        service.until(lambda: "ready:" in service.text())
        with Client(socket=path) as client:
            assert client.call("hello", max_tokens=4).result().usage["completion_tokens"] > 0
    finally:
        service.kill()


def test_training_names_the_extra() -> None:
    done = without_training("from jaxllm.cli.main import main\nmain(['pretrain', '--run', 'x'])")
    assert done.returncode == 1
    assert done.stderr == "error: training needs optax and orbax; run `pip install 'jaxllm[train]'`\n"


# A host program sets JAX: the packaged model computes the same, or refuses it by name.

# Sampling and penalties, and prefill in integers, under a host's settings and without.
PROGRAM = """
import jax
from jaxllm import Engine, EngineOptions, GenerationConfig, PrefillOptions, Sampling

NAMES = {"jax_enable_x64": (True, False), "jax_numpy_rank_promotion": ("raise", "allow"),
         "jax_numpy_dtype_promotion": ("strict", "standard")}
SAMPLING = Sampling(temperature=1.0, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=3)
texts = []
for when in (0, 1):
    for name, values in NAMES.items():
        jax.config.update(name, values[when])
    options = EngineOptions(context_tokens=128, prefill=PrefillOptions(mode="int8"))
    engine = Engine.open("default", options=options)
    asked = GenerationConfig(max_tokens=12, sampling=SAMPLING)
    texts.append("".join(engine.stream("Once upon a time", asked)))
    assert jax.config.jax_enable_x64 == (not when)
    engine.close()
assert texts[0] and texts[0] == texts[1], texts
"""


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_packaged_model_answers_the_same_under_a_hosts_settings():
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr


def test_settings_of_the_host_are_kept_out_and_left_alone():
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):

        @own_jax_settings()
        def inside():
            return jax.numpy.arange(3).dtype, (jax.numpy.zeros((2, 3)) + jax.numpy.zeros(3)).dtype

        assert [each.name for each in inside()] == ["int32", "float32"]
        assert jax.numpy.arange(3).dtype == "int64"


def test_immediate_execution_is_refused_by_name():
    with jax.disable_jit(), pytest.raises(ConfigError, match="jax_disable_jit is set"):
        require_usable_jax()


def test_a_platform_without_a_device_is_refused_by_name():
    done = run("import jaxllm; jaxllm.Engine.open('draft')", JAX_PLATFORMS="cuda")
    assert "ConfigError: JAX finds no device of JAX_PLATFORMS=cuda" in done.stderr


# Entry points of other distributions are found by name, and only when a name is not ours.

GROUPS = {"drafters": DRAFTERS, "codecs": CODECS, "architectures": ARCHITECTURES, "tasks": TASKS}
MODULE = """
from jaxllm.contexts.codecs import Codec
from jaxllm.models.architectures import ARCHITECTURES
from jaxllm.tasks import Task
CODEC = Codec("token", "channel")
ARCHITECTURE = ARCHITECTURES["llama"]
TASK = Task("fake", "a fake task", lambda folder, split: iter(()))
def drafter(*arguments):
    return arguments
"""
ENTRIES = """
[jaxllm.drafters]
fake = fake_package:drafter
ngram = fake_package:missing
[jaxllm.codecs]
fake = fake_package:CODEC
broken = absent_package:CODEC
[jaxllm.architectures]
fake = fake_package:ARCHITECTURE
[jaxllm.tasks]
fake = fake_package:TASK
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed distribution that adds an entry to each group."""
    info = tmp_path / "fake_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "fake_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fake_package", raising=False)
    is_added.cache_clear()
    yield tmp_path
    is_added.cache_clear()


def test_entries_are_found_by_name(distribution: Path) -> None:
    assert find_codec("fake") == Codec("token", "channel")
    assert architecture("fake") is ARCHITECTURES["llama"]
    found = find_task("fake")
    assert isinstance(found, Task)
    assert found.title == "a fake task"
    options = SpeculationOptions(drafter="fake")
    assert make_drafter("target", options) == ("target", options, None)  # pyright: ignore
    for registry in GROUPS.values():
        assert "fake" in registry
        assert "fake" not in list(registry)
    # A context that one has stored is read again.
    origin = Origin(
        model="m",
        level=100,
        adapter="",
        codec="fake",
        chunk_tokens=2,
        dtype="float16",
        heads=(5,),
        head_width=16,
    )
    record = Record(name="a", app="b", origin=origin)
    assert decoded(encoded(record), "b", "a") == record
    # Ours are not replaced.
    assert DRAFTERS["ngram"].__module__ == "jaxllm.serving.speculation.drafters"


def test_one_that_cannot_be_imported_names_its_distribution(distribution: Path) -> None:
    with pytest.raises(ConfigError, match=r"'broken', which fake-package adds to jaxllm\.codecs, cannot be"):
        find_codec("broken")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="no codec 'fake'"):
        find_codec("fake")
    with pytest.raises(ConfigError, match="no drafter 'fake'"):
        make_drafter("target", SpeculationOptions(drafter="fake"))  # pyright: ignore
    with pytest.raises(ConfigError, match="model_type 'fake' is not supported"):
        architecture("fake")
    for registry in GROUPS.values():
        with pytest.raises(KeyError):
            registry["fake"]
