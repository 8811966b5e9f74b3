"""A whole tiny run: it learns, resumes with the same parameters, and translates what it has learnt."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Library

from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import param_specs
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.optimizer import matrices
from jaxllm.training.seq2seq.pairs import PairRows, held_out_of, read_json_pairs, read_pairs
from jaxllm.training.seq2seq.run import export_best_seq2seq, train_seq2seq
from jaxllm.training.seq2seq.translation import Translator, bleu, likeness
from tests.training.seq2seq.tiny import SWITCH, tiny_recipe
from tests.training.tiny_runs import quiet


@pytest.fixture(scope="module")
def run(pairs_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train_seq2seq(tiny_recipe(), quiet(folder, pairs_data))
    return folder


def test_the_loss_falls_and_is_reported_by_direction(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["held_out_loss"] < lines[0]["loss"]
    assert set(lines[-1]["held_out_by_source"]) == {"there", "back"}
    assert json.loads((run / "summary.json").read_text())["best_step"] == 4


def test_a_run_that_was_stopped_ends_with_the_same_parameters(run, pairs_data, tmp_path, monkeypatch):
    real = PairRows.batch_at

    def stopped(rows, step):
        if step == 3:
            raise KeyboardInterrupt
        return real(rows, step)

    monkeypatch.setattr(PairRows, "batch_at", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_seq2seq(tiny_recipe(), quiet(tmp_path, pairs_data))
    monkeypatch.setattr(PairRows, "batch_at", real)
    resumed = load_file(train_seq2seq(tiny_recipe(), quiet(tmp_path, pairs_data)) / "model.safetensors")
    for name, value in load_file(run / "hf" / "model.safetensors").items():
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)


def test_the_folder_says_how_to_ask(run):
    files = read_tokenizer(run / "hf")
    translator = Translator.read(run / "hf")
    assert files.source_prefix == "number to word: "
    assert files.start_ids == (Library.from_file(str(run / "tokenizer.json")).token_to_id("<|pad|>"),)
    ids = translator.tokenizer.encode("number to word: 12")
    # The prefix is one token, and what follows is read as a text of its own, with its end.
    assert translator.tokenizer.decode(ids[1:]) == "12"
    assert [*ids[:1], *translator.tokenizer.encode("12")] == ids
    assert ids[-1] == files.eos_ids[0]
    assert files.source_text("word to number: one") == "word to number: one"
    assert export_best_seq2seq(run) == run / "hf"


def test_greedy_answers_are_the_likeliest_tokens_one_by_one(run):
    translator = Translator.read(run / "hf")
    sources = translator.encode([f"number to word: {n}" for n in (123, 7, 45)])
    answers = translator.translate(sources, most_tokens=6)
    assert all(1 <= len(answer) <= 6 for answer in answers)
    assert translator.agreement(sources, answers) == 1.0


def test_a_draft_learns_from_a_teacher_of_the_same_tokens(run, pairs_data, tmp_path):
    recipe = tiny_recipe(SWITCH, teacher_share=0.5, steps=2, dropout=0.0)
    with pytest.raises(ConfigError, match="--teacher"):
        train_seq2seq(recipe, quiet(tmp_path / "a", pairs_data))
    shared = {"tokenizer": run / "tokenizer.json", "teacher": run / "hf"}
    folder = train_seq2seq(recipe, quiet(tmp_path / "b", pairs_data), **shared)
    metrics = (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["penalty"] > 0
    translator = Translator.read(folder)
    sources = translator.encode(["number to word: 12"])
    assert 0 <= translator.agreement(sources, Translator.read(run / "hf").translate(sources, 6)) <= 1


def test_bleu_is_sacrebleus():
    # 4 of 5, 3 of 4, 2 of 3 and 1 of 2 n-grams match, and lengths are equal.
    assert bleu(["a b c d e"], ["a b c d f"]) == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 / 2) ** 0.25)
    assert bleu(["it is the same ."], ["it is the same ."]) == pytest.approx(100)
    with pytest.raises(ConfigError, match="a reference for each"):
        bleu(["a"], [])


def test_muon_takes_the_matrices_of_both_sides():
    shapes = param_specs(tiny_recipe(SWITCH).cfg)
    arrays = {name: np.zeros(spec.shape) for name, spec in shapes.items()}
    seen = {name for name, sides in matrices(arrays).items() if sides is not None}
    assert seen == {name for name in shapes if name.endswith((".q", ".k", ".v", ".o", ".up", ".down"))}


def test_two_files_become_bleu(run, pairs_data, tmp_path):
    words = [
        "eval",
        "pairs",
        run / "hf",
        "--source",
        pairs_data / "one.txt",
        "--reference",
        pairs_data / "two.txt",
    ]
    options = ["--prefix", "number to word:", "-o", tmp_path / "said.txt"]
    result = CliRunner().invoke(cli, [str(word) for word in [*words, *options]], catch_exceptions=False)
    assert json.loads(result.stdout)["lines"] == 60
    assert len((tmp_path / "said.txt").read_text(encoding="utf-8").splitlines()) == 60


def _json_lines(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def test_json_lines_are_pairs_with_each_target(tmp_path):
    records = [{"text": f"text {n}", "short": [f"t {n}", "t", "t"]} for n in range(40)]
    file = _json_lines(tmp_path / "a.jsonl", [*records, {"text": "none", "short": []}])
    words = ("one.txt", "two.txt")
    for name in words:
        (tmp_path / name).write_text("".join(f"{name} {n}\n" for n in range(40)))
    pairs = read_pairs([Source(pairs=words), Source(pairs=(file.name,), fields=("text", "short"))], tmp_path)
    assert pairs.texts[40:44] == [("text 0", "t 0"), ("text 0", "t"), ("text 1", "t 1"), ("text 1", "t")]
    taken, kept = pairs.split(0.2)
    # All targets of a source are on one side, which is the one that `--held-out` knows.
    sides = [
        {text for (text, _), of in zip(side.texts, side.of, strict=True) if of} for side in (taken, kept)
    ]
    assert not sides[0] & sides[1]
    found = held_out_of(read_json_pairs(file, "text", "short"), 0.2)
    assert {text for text, _ in found} == sides[1]
    with pytest.raises(ConfigError, match="line 1: a record needs text under 'long'"):
        read_json_pairs(file, "text", "long")


def test_json_lines_are_judged_by_what_is_right(run, tmp_path):
    file = _json_lines(tmp_path / "a.jsonl", [{"text": str(n), "word": ["one", "two"]} for n in range(60)])
    words = ["eval", "pairs", run / "hf", "--prefix", "number to word:", "--source", file]
    options = ["--fields", "text", "word", "--held-out", "0.5"]
    result = CliRunner().invoke(cli, [str(each) for each in [*words, *options]], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert 0 < found["lines"] < 60
    assert set(found) == {"lines", "exact", "rouge1", "rouge2", "rougeL"}
    assert CliRunner().invoke(cli, [str(each) for each in words]).exit_code == 2


def test_texts_are_like_the_best_of_their_references():
    found = likeness(["a b", "c"], [["a b", "x"], ["d"]])
    assert found == {"exact": 0.5, "rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}


def test_files_of_different_lengths_are_refused(pairs_data, tmp_path):
    (tmp_path / "one.txt").write_text("1\n2\n")
    (tmp_path / "two.txt").write_text("one\n")
    with pytest.raises(ConfigError, match="must be a pair"):
        train_seq2seq(tiny_recipe(), quiet(tmp_path / "run", tmp_path))
