"""Without the packages of the extra `train` everything but training works, and training names the extra."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.client import Client
from tests.serving.server.daemons import MAIN, Process
from tests.tiny import write_tiny_folder

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
