"""Others' load generators with answers of one length (`ignore_eos`) count the tokens that `bench service`'s
own counts. How close they are is only asked with JAXLLM_LOAD_QUIET=1, on a machine with nothing else to do.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.service.load import send
from tests.clients.test_packages import ENVIRONMENTS
from tests.serving.server.daemons import Process

CALLERS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 48, 32
QUIET = os.environ.get("JAXLLM_LOAD_QUIET") == "1"
SECONDS = 30 if QUIET else 4
BODY = {
    "model": "default", "prompt": [*range(5, 5 + PROMPT_TOKENS)], "max_tokens": ANSWER_TOKENS,
    "ignore_eos": True, "temperature": 0,
}  # fmt: skip
pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="make test-clients has its environment")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Process(tmp_path_factory.mktemp("load"), "--model", "default", "--http", "127.0.0.1:0") as service:
        yield service.ready()


def own(url: str, _: Path) -> tuple[int, float]:
    """Number of answers and seconds of the benchmark's generator."""
    request = {"time_s": 0.0, "headers": {}, "body": BODY | {"stream": True, "stream_options": {"include_usage": True}}}  # noqa: E501  # fmt: skip
    job = {"url": url, "requests": [request] * 10_000, "patience_s": 60.0}
    found = send(job | {"clients": CALLERS, "duration_s": float(SECONDS)})
    assert {(each["error"], each["tokens"]) for each in found} == {(None, ANSWER_TOKENS)}
    return len(found), max(each["ended_s"] for each in found) - min(each["sent_s"] for each in found)


def locust(url: str, folder: Path) -> tuple[int, float]:
    file = str(Path(__file__).with_name("load_locust.py"))
    options = ["--headless", "--json", "-u", str(CALLERS), "-r", str(CALLERS), "-t", f"{SECONDS}s"]
    found = json.loads(
        ran("locust", folder, "-f", file, "-H", url, *options, JAXLLM_LOAD_BODY=json.dumps(BODY))
    )
    (stats,) = found
    assert stats["num_failures"] == 0, stats
    return stats["num_requests"], stats["last_request_timestamp"] - stats["start_time"]


def ran(program: str, folder: Path, *options: str, **variables: str) -> str:
    """What a program of the environment `load` prints."""
    done = subprocess.run(
        [f"{ENVIRONMENTS}/load/bin/{program}", *options], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"HOME": str(folder), "HF_HUB_OFFLINE": "1", **variables}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("measured", [locust])
def test_others_count_what_the_benchmark_counts(
    measured: Callable[[str, Path], tuple[int, float]], url: str, tmp_path: Path
) -> None:
    own(url, tmp_path)
    rates = []
    for measure in (own, measured, own, measured) if QUIET else (own, measured):
        count, took_s = measure(url, tmp_path)
        assert count >= CALLERS
        rates.append(ANSWER_TOKENS * count / took_s)
    if QUIET:
        assert sum(rates[1::2]) == pytest.approx(sum(rates[::2]), rel=0.05)
