"""A whole tiny run: it learns, resumes with the same parameters, and translates what it has learnt."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Library

from jaxllm.checkpoints import huggingface
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.encoder_decoder import encoder_params, read_source
from jaxllm.models.parameters import param_specs
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.optimizer import matrices
from jaxllm.training.seq2seq.forward import dropout
from jaxllm.training.seq2seq.pairs import PairRows, held_out_of, read_json_pairs, read_pairs
from jaxllm.training.seq2seq.run import (
    Translator,
    bleu,
    cross_entropy,
    export_best_seq2seq,
    init_seq2seq,
    likeness,
    target_logits,
    train_seq2seq,
)
from tests.training.seq2seq.tiny import PAIRS as ENCODED
from tests.training.seq2seq.tiny import SWITCH, T5, batch, tiny_recipe
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
    with pytest.raises(ConfigError, match="a reference for each"):
        bleu(["a"], [])
    # Others are like the best of their references.
    found = likeness(["a b", "c"], [["a b", "x"], ["d"]])
    assert found == {"exact": 0.5, "rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}


def test_muon_takes_the_matrices_of_both_sides():
    shapes = param_specs(tiny_recipe(SWITCH).cfg)
    arrays = {name: np.zeros(spec.shape) for name, spec in shapes.items()}
    seen = {name for name, sides in matrices(arrays).items() if sides is not None}
    assert seen == {name for name in shapes if name.endswith((".q", ".k", ".v", ".o", ".up", ".down"))}


def evaluated(run, *options):
    words = ["eval", "pairs", run / "hf", "--prefix", "number to word:", *options]
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_two_files_become_bleu(run, pairs_data, tmp_path):
    files = ["--source", pairs_data / "one.txt", "--reference", pairs_data / "two.txt"]
    result = evaluated(run, *files, "-o", tmp_path / "said.txt")
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
    (tmp_path / "two.txt").write_text("one\n")
    with pytest.raises(ConfigError, match="must be a pair"):
        read_pairs([Source(pairs=words)], tmp_path)


def test_json_lines_are_judged_by_what_is_right(run, tmp_path):
    file = _json_lines(tmp_path / "a.jsonl", [{"text": str(n), "word": ["one", "two"]} for n in range(60)])
    found = json.loads(
        evaluated(run, "--source", file, "--fields", "text", "word", "--held-out", "0.5").stdout
    )
    assert 0 < found["lines"] < 60
    assert set(found) == {"lines", "exact", "rouge1", "rouge2", "rougeL"}
    assert evaluated(run, "--source", file).exit_code == 2


# Pairs named by their first token; the longer side decides the row's length.
PAIRS = [([10 + n] + [2] * (n % 7), [10 + n] + [3] * ((n * 5) % 9)) for n in range(40)]
ROWS = PairRows(
    PAIRS, np.arange(40, dtype=np.int32) % 2, (4, 8), batch_tokens=16, rows_multiple=1, start_id=1, seed=0
)


def test_an_epoch_has_every_pair_at_most_once_and_each_epoch_has_another_order():
    epochs = []
    for first in (0, ROWS.batches_per_epoch):
        batches = [ROWS.batch_at(first + step) for step in range(ROWS.batches_per_epoch)]
        epochs.append([int(row[0]) for batch in batches for row in batch.read])
        assert {batch.tokens.shape for batch in batches} == {(4, 4), (2, 8)}
    assert epochs[0] != epochs[1]
    assert len(set(epochs[0])) == len(epochs[0])
    assert len(epochs[0]) >= 36


def test_the_decoder_reads_what_it_should_have_said_one_token_later():
    batch = next(ROWS.held_out())
    assert (batch.tokens[:, 0] == 1).all()
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])

    few = dataclasses.replace(ROWS, pairs=PAIRS[:1], of=ROWS.of[:1])
    with pytest.raises(ConfigError, match="do not fill a batch"):
        few.batch_at(0)


# The forward pass over pairs computes what transformers computes, and what the served model does.


def model_of(family):
    """A family's config and its initial parameters."""
    cfg = tiny_recipe(family).cfg
    return cfg, jax.jit(lambda key: init_seq2seq(cfg, key))(jax.random.key(0))


def test_loss_is_that_of_transformers(tmp_path):
    cfg, params = model_of(T5)
    huggingface.write_folder(tmp_path, cfg, params)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    filled = batch()
    real = filled.weights > 0
    with torch.no_grad():
        theirs = model(
            input_ids=torch.tensor(filled.read.astype(np.int64)),
            attention_mask=torch.tensor(np.arange(8)[None] < filled.read_tokens[:, None]).long(),
            decoder_input_ids=torch.tensor(filled.tokens.astype(np.int64)),
            labels=torch.tensor(np.where(real, filled.targets, -100).astype(np.int64)),
        )
    logits, _ = jax.jit(lambda batch: target_logits(params, batch, cfg=cfg))(filled)
    losses = np.asarray(cross_entropy(logits, filled.targets))
    np.testing.assert_allclose(np.asarray(logits)[real], theirs.logits.numpy()[real], atol=1e-4)
    assert float((losses * filled.weights).sum() / filled.weights.sum()) == pytest.approx(
        float(theirs.loss), abs=1e-4
    )


def test_rows_are_what_the_served_model_says_of_each():
    """Of layers with experts and without."""
    cfg, params = model_of(SWITCH)
    filled = batch()

    @jax.jit
    def alone(read, valid, tokens):
        cache = new_cache(cfg, batch=1, tokens=8, dtype=jnp.float32)
        cache = read_source(params, encoder_params(params), read, valid, cache, cfg=cfg)
        hidden, _ = decoder.forward(params, tokens, cache, cfg=cfg)
        return decoder.logits(params, hidden, cfg=cfg)[0]

    logits, _ = jax.jit(lambda batch: target_logits(params, batch, cfg=cfg))(filled)
    for row, (source, target) in enumerate(ENCODED):
        theirs = alone(filled.read[row : row + 1], jnp.int32(len(source)), filled.tokens[row : row + 1])
        np.testing.assert_allclose(logits[row, : len(target)], theirs[: len(target)], atol=2e-5)


def test_recomputed_layers_have_the_same_gradients_and_keep_less():
    cfg, params = model_of(SWITCH)
    filled = batch()

    def loss(params, remat):
        drop = dropout(jax.random.key(1), 0.1)
        logits, routings = target_logits(params, filled, cfg=cfg, drop=drop, remat=remat)
        return cross_entropy(logits, filled.targets).mean() + sum(each.weights.mean() for each in routings)

    gradients, kept = {}, {}
    for remat in ("none", "dots", "full"):
        own = functools.partial(loss, remat=remat)
        gradients[remat] = jax.jit(jax.grad(own))(params)
        pull = jax.eval_shape(lambda params, own=own: jax.vjp(own, params)[1], params)
        kept[remat] = sum(leaf.size for leaf in jax.tree.leaves(pull))
    for remat in ("dots", "full"):
        for name, value in gradients["none"].items():
            np.testing.assert_allclose(gradients[remat][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert kept["full"] < kept["dots"] < kept["none"]


def test_dropout_keeps_the_mean_and_drops_its_share():
    x = jnp.ones((64, 250))
    dropped = np.asarray(dropout(jax.random.key(3), 0.25)(x, 7))
    assert abs((dropped == 0).mean() - 0.25) < 0.02
    assert abs(dropped.mean() - 1) < 0.03
    assert not np.array_equal(dropped, np.asarray(dropout(jax.random.key(3), 0.25)(x, 8)))
    np.testing.assert_array_equal(dropout(jax.random.key(3), 0.0)(x, 7), x)


def test_smoothing_spreads_a_share_over_all_tokens():
    logits, targets = jnp.array([[[0.0, 1.0, 2.0, -1.0]]]), jnp.array([[2]])
    wanted = np.array([0.025, 0.025, 0.925, 0.025])
    expected = -(wanted * np.asarray(jax.nn.log_softmax(logits))[0, 0]).sum()
    assert float(cross_entropy(logits, targets, 0.1)[0, 0]) == pytest.approx(expected, abs=1e-6)
