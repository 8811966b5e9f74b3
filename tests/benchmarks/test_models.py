"""The models of benchmarks, packaged texts and questions, and those of a data folder."""

import json

import numpy as np
import pytest

from benchmarks import samples
from benchmarks.experts.seq2seq import TaskPairs
from benchmarks.models import SHAPES, Checkpoint, shape_folder, write_random
from benchmarks.speculation.answers import read_prompts
from benchmarks.traces import TRACE_TASKS
from jaxllm.bundle import Bundle
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.parameters import parameter_count
from jaxllm.prepare import prepare
from jaxllm.tasks.example import held_out
from jaxllm.text.tokenizer import Tokenizer
from tests import tiny_encdec
from tests.tiny import TINY, tiny_params, write_tiny_bundle, write_tiny_folder


def nothing(*_):
    pass


def test_a_folder_is_its_own_checkpoint_at_any_width(tmp_path):
    folder = write_tiny_folder(tmp_path / "tiny")
    found = Checkpoint.find(folder)
    assert (found.name, found.stored, found.cfg) == ("tiny", None, TINY)
    assert found.folder(nothing) == folder
    assert found.widths(()) == ("f32",)
    assert found.widths(("int8", "int4", "int8")) == ("int8", "int4")


def test_a_float_bundle_comes_back_exactly(tmp_path):
    found = Checkpoint.find(write_tiny_bundle(tmp_path / "tiny.jaxllm", "f32"))
    folder = found.folder(nothing)
    assert read_config(folder) == TINY
    for name, value in read_params(folder, TINY):
        np.testing.assert_array_equal(value, tiny_params()[name])
    prepare(folder, tmp_path / "again.jaxllm")  # the tokenizer came along


def test_a_narrow_bundle_comes_back_as_what_it_stands_for(tmp_path):
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    found = Checkpoint.find(path)
    folder = found.folder(nothing)
    assert found.folder(nothing) == folder  # made once
    off = [np.abs(value - tiny_params()[name]).max() for name, value in read_params(folder, TINY)]
    assert 0 < max(off) < 0.02
    assert found.widths(()) == found.widths(("int8",)) == ("int8",)
    with pytest.raises(CheckpointError, match="holds int8 weights, not int4"):
        found.widths(("int4",))
    with pytest.raises(CheckpointError, match="no such file"):
        Checkpoint.find(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"15m, 110m, 250m, 0\.5b, 1b"):
        shape_folder("7t", nothing)


@pytest.mark.parametrize(("name", "millions"), [("15m", 15.2), ("110m", 110), ("250m", 258), ("1b", 1100)])
def test_shapes_have_the_size_of_their_names(name, millions):
    assert parameter_count(SHAPES[name]) / 1e6 == pytest.approx(millions, rel=0.02)


def test_random_weights_are_the_same_each_time_and_make_a_model(tmp_path):
    for name in ("one", "two"):
        write_random(tmp_path / name, TINY, nothing)
    pairs = zip(read_params(tmp_path / "one", TINY), read_params(tmp_path / "two", TINY), strict=True)
    for (name, one), (_, two) in pairs:
        np.testing.assert_array_equal(one, two)
        assert one.dtype.name == "bfloat16"
        assert name.endswith("scale") or 0 < np.abs(one.astype(np.float32)).mean() < 1
    prepare(tmp_path / "one", tmp_path / "one.jaxllm", weights="int8")
    with Bundle.open(tmp_path / "one.jaxllm") as bundle:
        assert bundle.cfg == TINY


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
    assert samples.chosen_tasks(tokenizer) == list(PREFIXES)
    with pytest.raises(ConfigError, match="has no task 'summarization'; it has translation_de_to_en, short"):
        samples.chosen_tasks(tokenizer, ["summarization"])
    with pytest.raises(ConfigError, match="names none of the tasks translation_de_to_en"):
        samples.chosen_tasks(Tokenizer(tiny_encdec.tokenizer(tasks={"other": "o: "})))
    assert [each.answer for each in samples.source_examples("translation_de_to_en", data)] == [
        "a dog",
        "two dogs",
    ]
    shorter = samples.source_examples("shortening", data)
    assert shorter
    assert all(held_out(each.user, 0.03) and not each.system for each in shorter)
    with pytest.raises(ConfigError, match="translation de-en has no packaged sample; give --data DIR"):
        samples.source_examples("translation_de_to_en", None)
    # As LLMCad's rows: translation, summary, question answering.
    found = read_prompts(data, tokenizer, count=2, most_tokens=60, seed=0)
    assert list(found) == [samples.SOURCE_TASKS[name].called for name in PREFIXES]
    asked = tokenizer.decode(found["question (emotion)"][0])
    assert asked.startswith("emotion: i feel glad")
    pairs = TaskPairs.of_data("emotion", data, tokenizer)
    assert (pairs.pairs, pairs.prefix, pairs.labels) == ([("i feel glad", "joy")], "emotion: ", True)


@pytest.mark.parametrize("task", TRACE_TASKS)
def test_every_task_of_a_trace_has_questions_with_a_right_answer_among_the_options(task):
    examples = samples.packaged_examples(task)
    assert len(examples) >= 8
    assert all(each.answer in each.options for each in examples)
    # A constant answer is no way to be right.
    assert len({each.answer for each in examples}) > 1


def test_questions_come_from_a_folder_or_from_the_package(tmp_path):
    assert len(samples.read_examples(("news", "emotion"), None, 3)["emotion"]) == 3
    (tmp_path / "tasks" / "sst2").mkdir(parents=True)
    record = json.dumps({"text": "a film", "label": "positive"})
    (tmp_path / "tasks" / "sst2" / "valid.jsonl").write_text(record)
    (example,) = samples.read_examples(("sentiment",), tmp_path)["sentiment"]
    assert example.user == "a film"
    # Free answers have references.
    for task in ("shorten", "chat summary"):
        assert all(each.references == (each.answer,) for each in samples.packaged_examples(task))
    with pytest.raises(ConfigError, match=r"task mood has no packaged sample.*--data DIR"):
        samples.read_examples(("mood",), None)


def test_stories_are_whole_and_many():
    stories = samples.read_stories(None)
    assert len(stories) > 30
    assert all(each[-1] in '."' and "<|" not in each for each in stories)
    with pytest.raises(ConfigError, match=r"tinystories_valid\.txt: cannot be read"):
        samples.read_stories(samples.stories_file(None).parent)
