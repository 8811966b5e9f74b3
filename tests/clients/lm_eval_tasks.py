"""Runs five tasks of lm-evaluation-harness, in its own environment, over a service, and prints each request
with its answer in JSON. The tasks are given as files: nothing is downloaded.

    python lm_eval_tasks.py URL TOKENIZER TASKS CONCURRENT
"""

import json
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

url, tokenizer, tasks, concurrent = sys.argv[1:]
model = LocalCompletionsAPI(
    base_url=f"{url}/v1/completions", model="default", tokenizer=tokenizer, tokenizer_backend="huggingface",
    num_concurrent=int(concurrent), max_length=2048, batch_size=1,
)  # fmt: skip
manager = TaskManager(include_path=tasks, include_defaults=False)
names = sorted(manager.all_tasks)
found = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0)
samples = {
    name: [
        {"arguments": each["arguments"], "answers": each["resps"]} for each in found["samples"][name]
    ]
    for name in names
}  # fmt: skip
print("RESULT " + json.dumps({"results": found["results"], "samples": samples}, default=str))
