"""Tasks of encoder-decoders: those that a model's folder names, held out, without an instruction."""

import json

import pytest

from benchmarks.experts.seq2seq import TaskPairs
from benchmarks.samples.source_tasks import SOURCE_TASKS, chosen_tasks, source_examples
from benchmarks.speculative.prompts import read_prompts
from jaxllm.errors import ConfigError
from jaxllm.tasks.example import held_out
from jaxllm.text.tokenizer import Tokenizer
from tests import tiny_encdec

PREFIXES = {"translation_de_to_en": "to English: ", "shortening": "shorten: ", "emotion": "emotion: "}


def write_data(folder):
    files = {
        "multi30k/val.de": "ein hund\n\nzwei hunde\n",
        "multi30k/val.en": "a dog\n\ntwo dogs\n",
        "emotion/valid.jsonl": json.dumps({"text": "i feel glad", "label": "joy"}),
    }
    long = [json.dumps({"text": f"the {n} dogs ran home", "summaries": ["dogs ran"]}) for n in range(200)]
    files |= {f"compression/{name}.jsonl": "\n".join(long) for name in ("google", "broadcast", "gigaword")}
    for name, text in files.items():
        (folder / "tasks" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tasks" / name).write_text(text)
    return folder


def test_a_model_is_asked_its_own_tasks(tmp_path):
    data, tokenizer = write_data(tmp_path), Tokenizer(tiny_encdec.tokenizer(tasks=PREFIXES))
    assert chosen_tasks(tokenizer) == list(PREFIXES)
    with pytest.raises(ConfigError, match="has no task 'summarization'; it has translation_de_to_en, short"):
        chosen_tasks(tokenizer, ["summarization"])
    with pytest.raises(ConfigError, match="names none of the tasks translation_de_to_en"):
        chosen_tasks(Tokenizer(tiny_encdec.tokenizer(tasks={"other": "o: "})))
    assert [each.answer for each in source_examples("translation_de_to_en", data)] == ["a dog", "two dogs"]
    shorter = source_examples("shortening", data)
    assert shorter
    assert all(held_out(each.user, 0.03) and not each.system for each in shorter)
    with pytest.raises(ConfigError, match="translation de-en has no packaged sample; give --data DIR"):
        source_examples("translation_de_to_en", None)
    # As LLMCad's rows: translation, summary, question answering.
    found = read_prompts(data, tokenizer, count=2, most_tokens=60, seed=0)
    assert list(found) == [SOURCE_TASKS[name].called for name in PREFIXES]
    asked = tokenizer.decode(found["question (emotion)"][0])
    assert asked.startswith("emotion: i feel glad")
    pairs = TaskPairs.of_data("emotion", data, tokenizer)
    assert (pairs.pairs, pairs.prefix, pairs.labels) == ([("i feel glad", "joy")], "emotion: ", True)
