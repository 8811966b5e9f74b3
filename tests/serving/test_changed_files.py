"""Tests an engine whose file is changed, in a forked process, and when it is closed."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.bundle import Bundle
from jaxllm.errors import BundleError, ConfigError
from tests.serving.memory import budget

# As few graphs as an answer takes: every test opens a file of its own.
OPTIONS = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(64,), decode_block=4)
PROMPT, CONFIG = "Once upon a time", GenerationConfig(max_tokens=12, ignore_eos=True)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def overwrite(path: Path) -> None:
    """As `cp` does, which opens the file that is there."""
    later = bytes(byte ^ 1 for byte in path.read_bytes())
    with path.open("r+b") as file:
        file.write(later)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff")


CHANGES: dict[str, Callable[[Path], None]] = {"truncate": truncate, "overwrite": overwrite, "flip": flip}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@pytest.fixture
def path(tiny_bundle: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copy(tiny_bundle, tmp_path / "served.jaxllm"))
    # Whatever the clock's resolution, a change gives it another time.
    os.utime(copy, ns=(10**18, 10**18))
    return copy


@pytest.fixture(params=["resident", "streamed"])
def served(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    options = OPTIONS
    if request.param == "streamed":
        whole = Engine.open(path, options=OPTIONS, warm_up=False)
        options = dataclasses.replace(OPTIONS, memory_bytes=budget(whole, 0.9))
        whole.close()
    engine = Engine.open(path, options=options, warm_up=False)
    engine.warm_up(prompt_tokens=engine.stream(PROMPT, CONFIG).prompt_tokens, max_tokens=12)
    assert (engine.model.streamed is not None) == (request.param == "streamed")
    yield engine
    engine.close()


@every_change
def test_a_file_changed_between_answers_is_refused(served: Engine, path: Path, change) -> None:
    served.generate(PROMPT, CONFIG)
    change(path)
    with pytest.raises(BundleError, match=r"served\.jaxllm was changed in place while it was open"):
        served.generate(PROMPT, CONFIG)


@pytest.mark.parametrize("place", ["between blocks", "while tokens are computed"])
def test_a_file_changed_in_the_middle_of_an_answer_gives_no_more_of_it(served, path, place) -> None:
    answer, prefill, began = served.stream(PROMPT, CONFIG), served.runner.prefill, ""

    def changing(*args):
        result = prefill(*args)
        flip(path)
        return result

    if place == "between blocks":
        whole, began = served.generate(PROMPT, CONFIG).text, next(answer)
        assert whole.startswith(began)
        truncate(path)
    else:
        served.runner.prefill = changing
    with pytest.raises(BundleError, match="changed in place"):
        answer.result()
    assert answer.text == began


def test_a_file_that_is_replaced_goes_on_as_it_was(served: Engine, path: Path, tmp_path: Path) -> None:
    before = served.generate(PROMPT, CONFIG).tokens
    other = tmp_path / "other"
    other.write_bytes(b"of another model")
    other.replace(path)
    assert served.generate(PROMPT, CONFIG).tokens == before
    path.unlink()
    assert served.generate(PROMPT, CONFIG).tokens == before
    served.close()
    served.close()
    with pytest.raises(ConfigError, match="this engine is closed; open the model again"):
        served.generate(PROMPT, CONFIG)


@every_change
def test_what_is_read_later_of_a_bundle_is_refused_too(path: Path, change) -> None:
    with Bundle.open(path) as bundle:
        change(path)
        for use in (bundle.tokenizer_files, bundle.load, bundle.verify, bundle.unchecked):
            with pytest.raises(BundleError, match="changed in place"):
                use()


BEGIN = """
import gc, os, signal, sys
from pathlib import Path
import jax
from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.errors import ConfigError
options = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(64,), decode_block=4)
config = GenerationConfig(max_tokens=4)
def answered():
    engine = Engine.open(sys.argv[1], options=options, warm_up=False)
    answer = engine.stream("Once", config)
    engine.warm_up(prompt_tokens=answer.prompt_tokens, max_tokens=4)
    answer.result()
    return engine
"""
FORKING = """
engine = answered()
begun = engine.stream("Once upon", config)
uses = [
    lambda: engine.generate("Once", config),
    lambda: begun.result(),
    lambda: engine.warm_up(),
    lambda: Engine.open(sys.argv[1], options=options),
    lambda: engine.runner.start(16),
]
for use in uses:
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            use()
        except ConfigError as error:
            os._exit(7 if "was forked from one that had opened a model" in str(error) else 8)
        os._exit(9)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
begun.result()
engine.close()
"""
OPENING = """
def held():
    gc.collect()
    process = Path("/proc/self")
    return [
        len(jax.devices()[0].client.live_executables()),
        len(jax.live_arrays()),
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
        (process / "maps").read_text().count(sys.argv[1]),
    ]
def once():
    engine = answered()
    opened = held()
    engine.close()
    engine.model.bundle.close()
    return opened
once()
before = held()
opened = once()
assert opened[0] and opened[1] and opened[4], opened
once()
after = held()
assert before == after, (before, after)
"""


def run(script: str, path: Path) -> list[str]:
    """What a process of its own prints: JAX warns of forks, and the suite's threads are many."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + script, str(path)],
        capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_a_forked_process_is_told_at_once(path: Path) -> None:
    assert run(FORKING, path) == ["7"] * 5


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list a process's files")
def test_a_closed_engine_holds_nothing(path: Path) -> None:
    """Memory itself says less: what compilers leave in allocators varies by more than it is."""
    run(OPENING, path)
