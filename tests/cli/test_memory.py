"""`jaxllm info --memory`: what holds memory after a start, and that it is little."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.outcome import Run, failed

MEGABYTE = 1_000_000
# After a start from disk, with room for other systems: measured were 103 MB and 9 to 24 MB.
MOST_ANONYMOUS, MOST_OF_BUCKETS = 150 * MEGABYTE, 40 * MEGABYTE


def started(cache: Path) -> dict:
    # Not with the suite's own cache of what JAX compiles, from which no bucket is kept.
    suite = ("JAXLLM_BUCKETS_BYTES", "JAX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(suite)}
    environment = {**kept, "JAXLLM_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "jaxllm.cli.entry", "info", "--memory", "--json"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_start_from_disk_holds_little_memory(tmp_path: Path) -> None:
    compiled, read = started(tmp_path), started(tmp_path)
    assert compiled["compiled_buckets"] == read["loaded_buckets"] > 0
    assert compiled["loaded_buckets"] == read["compiled_buckets"] == 0
    for facts in (compiled, read):
        assert sum(facts["anonymous"].values()) == facts["anonymous_bytes"]
        assert facts["weights_bytes"] > MEGABYTE
        assert facts["cache_bytes"] > MEGABYTE
        parts = facts["anonymous_bytes"] + facts["weights_bytes"] + facts["libraries_bytes"]
        assert parts == facts["resident_bytes"] <= facts["peak_bytes"]
    assert read["anonymous_bytes"] < MOST_ANONYMOUS
    assert read["anonymous"]["buckets"] < MOST_OF_BUCKETS
    # Nothing compiles, and the compiler's memory is not there.
    assert read["peak_bytes"] < compiled["peak_bytes"]


def test_what_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = run("info", "--memory", "--verify")
    assert done.code == 2
    assert "give --verify or --memory, not both" in done.err
    monkeypatch.setattr("jaxllm.serving.host.machine._SMAPS", tmp_path / "smaps")
    failed(run("info", "--memory"), "Linux alone")
