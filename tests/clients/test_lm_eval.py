"""lm-evaluation-harness scores five of its own kinds of tasks over the service, and finds what `jaxllm eval`
finds in this process."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.checkpoints.tokenizer_folder import write_tokenizer
from jaxllm.serving.evaluation.tasks import score_branches_of
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.steps.branching import Branching
from tests.clients.test_packages import ENVIRONMENTS
from tests.serving.server.daemons import Process

MODEL = os.environ.get("JAXLLM_LM_EVAL_MODEL", "default")
# Folder with `NAME/valid.jsonl`; without one the questions below are asked.
CITIES = {"Paris": "France", "Rome": "Italy", "Vienna": "Austria", "Madrid": "Spain"}
RECORDS = [
    {
        "query": f"Question: In which country is {city}?\nAnswer:", "choices": [*CITIES.values()],
        "gold": index, "text": f"{city} is the capital of {country}. It is old, and many people live there.",
        "long": f"{city} is old. " * 60 + f"It is in {country}.",
    }
    for index, (city, country) in enumerate(CITIES.items())
]  # fmt: skip
COMMON: dict[str, Any] = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "{{query}}", "doc_to_choice": "{{choices}}",
    "doc_to_target": "gold", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "choices": CHOICE,
    # The text differs, and the end is one (Winograd's form).
    "beginnings": {
        **CHOICE, "doc_to_text": "gold", "doc_to_choice": "{{choices}}", "doc_to_target": "{{query}}",
        "metric_list": [{"metric": "acc"}],
    },
    "yes-no": {
        **CHOICE, "doc_to_text": "{{text}}\nQuestion: Is that right?\nAnswer:",
        "doc_to_choice": ["no", "yes"], "doc_to_target": "{{1}}", "metric_list": [{"metric": "acc"}],
    },
    "last-word": {
        "output_type": "loglikelihood", "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{long}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}  # fmt: skip


@pytest.mark.skipif(not ENVIRONMENTS, reason="make test-clients has its environment")
def test_five_tasks_over_http_are_those_in_process(tmp_path: Path) -> None:
    engine = Engine.open(MODEL, warm_up=False)
    (tokenizer := tmp_path / "tokenizer").mkdir()
    write_tokenizer(tokenizer, engine.tokenizer.files)
    (tasks := tmp_path / "tasks").mkdir()
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(tmp_path / "data.jsonl")}}
        spec = {"task": name, **COMMON, **task, "dataset_kwargs": files}
        (tasks / f"{name}.yaml").write_text(json.dumps(spec))
    with Process(tmp_path, "--model", MODEL, "--http", "127.0.0.1:0") as service:
        command = [f"{ENVIRONMENTS}/lm_eval/bin/python", str(Path(__file__).with_name("lm_eval_tasks.py"))]
        done = subprocess.run(
            [*command, service.ready(), str(tokenizer), str(tasks), "2"], cwd=tmp_path, text=True,
            env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, timeout=600, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    found = json.loads(done.stdout.partition("RESULT ")[2])
    assert found["samples"].keys() == TASKS.keys()
    for name, samples in found["samples"].items():
        assert len(samples) == len(RECORDS)
        for sample in samples:
            compared(engine, name, sample)


def compared(engine: Engine, name: str, sample: dict[str, Any]) -> None:
    """Checks the answers to one question's requests."""
    tokenizer, scorer = engine.tokenizer, Scorer(engine.runner)
    scorer.prepare(engine.options.context_tokens)
    for (before, *end), answer in zip(sample["arguments"], sample["answers"], strict=True):
        if end:
            ids = tokenizer.encode(before + end[0], add_special_tokens=False)
            count = len(tokenizer.encode(before, add_special_tokens=False))
            ((got, greedy),) = answer
        else:
            # The harness lets a text follow the end token.
            ids, count, greedy = [tokenizer.eos_ids[0], *tokenizer.encode(before)], 1, None
            (got,) = answer
        scores, best = scorer.predict(ids[:-1], ids[1:])
        assert float(got) == pytest.approx(scores[count - 1 :].sum(dtype=np.float64), rel=1e-5), name
        if greedy is None:
            continue
        assert greedy == np.array_equal(best[count - 1 :], ids[count:])
        # Tasks keep keys and values in 32 bits, and the cache of an int8 model has 16.
        (task,) = score_branches_of(engine, [Branching(tuple(ids[:count]), (tuple(ids[count:]),))])
        assert float(got) == pytest.approx(task.sums[0], rel=2e-2, abs=0.2), name
