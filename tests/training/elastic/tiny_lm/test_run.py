"""Training a tiny LM: both heads learn a rule; a whole run ends in a bundle and resumes to the same bits."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm.training.elastic.tiny_lm.run
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import elastic_parts
from jaxllm.bundle.tiny_lm import TinyLm, read_tiny_lm, tiny_lm_parts
from jaxllm.checkpoints.tokenizer_folder import write_tokenizer
from jaxllm.elastic.compression import marked
from jaxllm.elastic.ladder import Ladder
from jaxllm.elastic.slo import SLOS, marks, marks_of
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import tiny_lm as tlm
from jaxllm.models.encoder.mobilebert import encoder_shapes, init_values
from jaxllm.serving.elastic.tiny_lm import TinyPlanner
from jaxllm.tasks.example import TaskExample
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.elastic.tiny_lm.labels import Answers, ElasticModel, Question
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.elastic.tiny_lm.rows import (
    MARKED_SLOS,
    DecisionRows,
    ScoreRows,
    align,
    score_rows,
)
from jaxllm.training.elastic.tiny_lm.run import (
    Start,
    TinyLmSources,
    answer_metrics,
    decide_job,
    decision_metrics,
    decision_rows,
    decisions,
    keep_metrics,
    keep_scores,
    score_job,
    train_tiny_lm,
)
from jaxllm.training.loop.parallel import make_mesh
from jaxllm.training.loop.trainer import Trainer, train
from tests.models.encoder.tiny import write_encoder
from tests.tiny import TINY, VOCAB_SIZE, tiny_params, tiny_tokenizer, write_tiny_bundle
from tests.training.tiny_runs import ENCODER, HEAD, ONE, TLM_RECIPE, quiet, syllables, write_data

TOKENIZER = Tokenizer(tiny_tokenizer())


def learn(job, settings, rows, folder):
    trainer = Trainer(job, settings, make_mesh(ONE, settings.batch))
    return train(trainer, rows.batch_at, rows.held_out, folder, lambda progress: None).params


@pytest.mark.slow
def test_the_score_head_learns_which_words_stay(tmp_path):
    settings = dataclasses.replace(HEAD, steps=120, batch=16, checkpoint_steps=120)
    start = Start.of(dataclasses.replace(TLM_RECIPE, score=settings), TOKENIZER)
    reader = start.reader(settings.row_tokens)
    texts = syllables(120)
    rows, held_out = (
        ScoreRows(score_rows([part], TOKENIZER, reader, ("",), 0), start.mark_ids, settings.batch, 0)
        for part in (texts[:100], texts[100:])
    )
    params = learn(score_job(start, settings), settings, rows, tmp_path)
    assert not any(name.startswith("decide.") for name in params)
    found = keep_metrics(start.cfg, params, held_out.held_out())
    assert found["f1"] > 0.97
    assert found["accuracy"] > 0.97 > found["majority"]
    untrained = keep_metrics(start.cfg, start.params, held_out.held_out())
    assert untrained["f1"] < 0.9


@pytest.mark.slow
def test_the_decision_head_learns_what_marks_say_and_moves_nothing_else(tmp_path):
    settings = dataclasses.replace(HEAD, steps=200, batch=32, row_tokens=8, checkpoint_steps=200)
    recipe = dataclasses.replace(TLM_RECIPE, score=settings, decide=settings)
    start = Start.of(recipe, TOKENIZER)
    draw = np.random.default_rng(0)
    read = draw.integers(0, 200, (40, 8)).astype(np.int32), np.ones((40, 8), bool)
    ttft, tpot = np.array([marks_of(slo) for slo in MARKED_SLOS]).T
    rule = np.stack([tpot - 9 >= 4, np.clip(ttft // 3, 0, 2)], axis=-1).astype(np.int32)
    labels = np.broadcast_to(rule, (40, *rule.shape))
    rows = DecisionRows(*read, labels, MARKED_SLOS, start.mark_ids, settings.batch, 0)
    other = dataclasses.replace(rows, tokens=read[0][:3, ::-1], mask=read[1][:3], labels=labels[:3])
    trained = {name: value for name, value in start.params.items() if not name.startswith("decide.")}
    job = decide_job(start, trained, settings)
    params = learn(job, settings, rows, tmp_path)
    assert params.keys() == start.params.keys() - trained.keys()
    chosen = decisions(start.cfg, {**trained, **params}, other)
    assert (chosen == other.labels).all(-1).mean() > 0.95


@pytest.mark.slow
def test_the_first_row_of_a_prompt_decides():
    draw = np.random.default_rng(0)
    short = dataclasses.replace(HEAD, row_tokens=8)
    recipe = dataclasses.replace(TLM_RECIPE, score=short, decide=dataclasses.replace(short, batch=4))
    start = Start.of(recipe, TOKENIZER)
    reader = start.reader(8)
    texts = (" ".join("a" * words) for words in (1, 9, 30))
    examples = [TaskExample(user=each, answer="b", options=("b", "c")) for each in texts]
    questions = [Question.read(TOKENIZER, each) for each in examples]
    read = [reader.rows(each.prompt) for each in questions]
    assert len(read[0][0]) < len(read[2][0])
    classes = len(recipe.levels), len(recipe.prompt_ratios)
    answers = Answers(draw.random((3, *classes)) < 0.5, np.ones((3, classes[1])))
    rows = decision_rows(recipe, answers, questions, np.ones(3, bool), reader, SLOS)
    held_out = [batch.choices[batch.weights[:, 0] > 0] for batch in rows.held_out()]
    np.testing.assert_array_equal(np.concatenate(held_out), rows.labels.reshape(-1, 2))
    wide = {name: 4 * value for name, value in start.params.items()}
    chosen = decisions(start.cfg, wide, rows)
    decide = jax.jit(functools.partial(tlm.decide, wide, cfg=start.cfg))
    for question, (tokens, mask) in enumerate(read):
        for number, slo in enumerate(SLOS):
            each = decide(marked(tokens[:1], slo, start.mark_ids), mask[:1])
            assert chosen[question, number].tolist() == [
                int(np.asarray(logits)[0].argmax()) for logits in each
            ]


def test_metrics_of_decisions_and_what_they_are_worth_by_hand():
    slos = SLOS[0], SLOS[-1]
    labels = np.array([[[0, 0], [1, 1]], [[0, 1], [0, 1]], [[0, 0], [0, 1]]])
    chosen = np.array([[[0, 0], [1, 0]], [[0, 1], [0, 1]], [[1, 0], [0, 1]]])
    assert decision_metrics(chosen, labels, slos) == {
        "accuracy": 0.6667, "model_accuracy": 0.8333, "prompt_accuracy": 0.8333, "majority": 0.6667,
        "accuracy_by_slo": {"<100,100>": 0.6667, "<20,50>": 0.6667},
    }  # fmt: skip
    ratios = (0.5, 1.0)
    correct = np.array([[[False, False], [True, False]], [[True, False], [False, True]]])
    # The first takes the whole model with half a prompt, also where that takes too long.
    chosen = np.array([[[1, 0], [1, 0]], [[0, 1], [0, 0]]])
    worth = answer_metrics(Answers(correct, np.array([ratios] * 2)), chosen, slos, (20, 100), ratios)
    assert worth["<100,100>"] == {"decided": 0.5, "default": 0.5, "best": 1.0}
    assert worth["<20,50>"] == {"decided": 0.5, "default": 0.0, "best": 0.5}


def test_rows_label_the_texts_words_and_nothing_else():
    start = Start.of(TLM_RECIPE, TOKENIZER)
    reader = start.reader(24)
    (text,) = [align("ab kc d ke kf gh ki", "kc ke kf ki")]
    rows = score_rows([[], [text]], TOKENIZER, reader, ("Hm?",), 0)
    # Longer than a row: in two, each with room for marks.
    assert rows.tokens.shape == (2, 24)
    counted = rows.weights > 0
    said = TOKENIZER.decode(rows.tokens[counted].tolist())
    assert said.split() == text.text.split()
    kept = TOKENIZER.decode(rows.tokens[counted & (rows.labels > 0)].tolist())
    assert kept.split() == ["kc", "ke", "kf", "ki"]
    assert not counted[:, :2].any()
    assert rows.mask[:, :2].all()
    assert set(rows.sources.reshape(-1).tolist()) == {1}
    batch = ScoreRows(rows, start.mark_ids, 4, 0).batch_at(3)
    assert set(batch.tokens[:, 0].tolist()) <= set(start.mark_ids[:9])
    assert set(batch.tokens[:, 1].tolist()) <= set(start.mark_ids[9:])


def test_batches_take_every_row_once_an_epoch_and_follow_from_the_step():
    start = Start.of(TLM_RECIPE, TOKENIZER)
    rows = score_rows([syllables(120)[:30]], TOKENIZER, start.reader(48), ("",), 0)
    count = len(rows.tokens)
    batches = ScoreRows(rows, start.mark_ids, count, 0)
    for step in (0, 1):
        batch = batches.batch_at(step)
        for name, value in dataclasses.asdict(batches.batch_at(step)).items():
            np.testing.assert_array_equal(getattr(batch, name), value)
        assert sorted(map(tuple, batch.tokens[:, 2:])) == sorted(map(tuple, rows.tokens[:, 2:]))
    assert not np.array_equal(batches.batch_at(0).tokens[:, 2:], batches.batch_at(1).tokens[:, 2:])
    held_out = list(dataclasses.replace(batches, batch=7).held_out())
    assert sum(batch.weights.sum() for batch in held_out) == rows.weights.sum()
    assert {len(batch.tokens) for batch in held_out} == {7}

    # Versions of a text never share a row, and a text may stand in a marker.
    reader = Start.of(TLM_RECIPE, TOKENIZER).reader(48)
    texts = [align("ka ba ma", "ka"), align("ka ba ma", "ka ba")] * 3
    assert len(score_rows([texts], TOKENIZER, reader, (), 0).tokens) == 6
    for text in ("t", "a", "user"):
        rows = score_rows([[align(text, text)]], TOKENIZER, reader, (f"{text} is", ""), 0)
        assert TOKENIZER.decode(rows.tokens[rows.weights > 0].tolist()) == text


@functools.cache
def elastic():
    cfg = dataclasses.replace(TINY, layers=1, attention_windows=())
    params = jax.tree.map(jnp.asarray, dict(tiny_params(cfg)))
    return ElasticModel(cfg=cfg, params=params, ladder=Ladder(levels=(50, 100)), tokenizer=TOKENIZER)


def run(folder, data, recipe=TLM_RECIPE):
    sources = TinyLmSources.read(recipe, data, TOKENIZER, TINY.window_tokens)
    return train_tiny_lm(sources, elastic(), quiet(folder), name="tiny")


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_and_ends_in_a_bundle(data, tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", data)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["parameters"] == sum(value.size for value in whole.params.values())
    assert {"shortened", "used", "best_step"} <= summary["score"].keys()
    assert list(summary["answers"]["right_by_level"]) == ["50", "100"]
    assert len(summary["decide"]["answered_right"]) == len(SLOS)

    with monkeypatch.context() as patch:
        patch.setattr(jaxllm.training.elastic.tiny_lm.run, "lightest", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed", data)
        # What takes long is kept: the model's answers, and what words it uses.
        patch.undo()
        patch.setattr(jaxllm.training.elastic.tiny_lm.run, "answer", stop)
        patch.setattr(jaxllm.training.elastic.tiny_lm.run, "token_support", stop)
        again = run(tmp_path / "killed", data)
    assert again.params.keys() == whole.params.keys()
    for name, value in whole.params.items():
        np.testing.assert_array_equal(again.params[name], value)
    with pytest.raises(ConfigError, match="another run"):
        run(tmp_path / "killed", data, dataclasses.replace(TLM_RECIPE, questions=20))

    parts = elastic_parts(elastic().ladder) | tiny_lm_parts(whole)
    path = write_tiny_bundle(
        tmp_path / "m.jaxllm", cfg=elastic().cfg, params=tiny_params(elastic().cfg), parts=parts
    )
    stored = read_tiny_lm(Bundle.open(path))
    assert stored is not None
    assert (stored.cfg, stored.levels, stored.mark_ids) == (whole.cfg, whole.levels, whole.mark_ids)
    assert stored.row_tokens == TLM_RECIPE.score.row_tokens
    for name, value in whole.params.items():
        np.testing.assert_array_equal(stored.params[name], value)


def stop(*_, **__):
    raise KeyboardInterrupt


def test_sources_and_starts_that_are_refused(tmp_path):
    """Whatever a run takes and lacks is said before it begins."""
    data = write_data(tmp_path)
    (data / "long.jsonl").write_text('{"text": "ka ma", "summaries": []}\n')
    (data / "one.jsonl").write_text('{"text": "ka ma", "summaries": ["ka"]}\n')
    for change, message in (
        ({"compressions": ("none.jsonl",)}, r"cannot read .*none\.jsonl"),
        ({"compressions": ("long.jsonl",)}, "no text with a shorter version"),
        ({"compressions": ("one.jsonl",)}, "two distinct documents"),
        ({"tasks": ("news",)}, "cannot read .*agnews"),
        ({"questions": 2, "held_out_share": 1e-9}, "there must be some on either side"),
        ({"used_questions": 1}, "of 1 questions . are held out"),
        ({"encoder": None}, "no encoder"),
    ):
        with pytest.raises(ConfigError, match=message):
            TinyLmSources.read(dataclasses.replace(TLM_RECIPE, **change), data, TOKENIZER, 128)
    with pytest.raises(CheckpointError, match="nowhere"):
        TinyLmSources.read(TLM_RECIPE, data, TOKENIZER, 128, data / "nowhere")
    with pytest.raises(ConfigError, match=r"lacks \[30\]"):
        run(tmp_path, data, dataclasses.replace(TLM_RECIPE, levels=(30, 100)))
    few = dataclasses.replace(
        ENCODER, vocab_size=VOCAB_SIZE - 1, norm="no_norm", bottleneck_size=8, share_bottleneck=True
    )
    write_encoder(tmp_path, few, init_values(encoder_shapes(few), jax.random.key(3)))
    write_tokenizer(tmp_path, tiny_tokenizer(chat=False))
    with pytest.raises(ConfigError, match=f"the encoder only {VOCAB_SIZE - 1}"):
        Start.of(TLM_RECIPE, TOKENIZER, tmp_path)
    long = dataclasses.replace(HEAD, row_tokens=49)
    with pytest.raises(ConfigError, match=r"row_tokens \(49\)"):
        Start.of(dataclasses.replace(TLM_RECIPE, score=long, decide=long), TOKENIZER)


def test_a_trained_encoder_is_under_both_heads(tmp_path):
    cfg = dataclasses.replace(
        ENCODER, bottleneck_size=8, share_bottleneck=True, norm="no_norm", layers=2, window_tokens=64
    )
    trained = init_values(encoder_shapes(cfg), jax.random.key(3))
    write_encoder(tmp_path, cfg, trained)
    write_tokenizer(tmp_path, tiny_tokenizer(chat=False))
    start = Start.of(TLM_RECIPE, TOKENIZER, tmp_path)
    assert start.own == tiny_tokenizer(chat=False)
    # No token is reserved for marks: they stand behind the vocabulary.
    assert start.mark_ids == tuple(range(VOCAB_SIZE, VOCAB_SIZE + len(marks())))
    assert start.cfg.encoder == dataclasses.replace(cfg, vocab_size=VOCAB_SIZE + len(marks()))
    np.testing.assert_array_equal(start.params["embed.tokens"][:VOCAB_SIZE], trained["embed.tokens"])
    for head in ("score", "decide"):
        np.testing.assert_array_equal(start.params[f"{head}.layers.1.widen"], trained["layers.1.widen"])

    # It reads prompts by its own tokenizer, and scores the large model's tokens, of a word alike.
    reader = start.reader(16)
    assert reader.own is not None
    example = TaskExample(system="Is it?", user="hello the hill of them", answer="yes", options=("yes", "no"))
    question = Question.read(TOKENIZER, example)
    (scores,) = keep_scores(start.cfg, start.params, reader, [question])
    words = question.prompt.words
    assert scores.shape == words.shape
    for word in set(words[words >= 0]):
        assert len(set(scores[words == word])) == 1
    assert len(set(scores[~question.prompt.forced].round(6))) == 5


@pytest.mark.parametrize("own", [False, True])
def test_training_reads_a_prompt_as_service_does(own):
    start = Start.of(TLM_RECIPE, TOKENIZER)
    start = dataclasses.replace(start, own=tiny_tokenizer(chat=False) if own else None)
    wide = {name: 4 * value for name, value in start.params.items()}
    example = TaskExample(
        user="the hill of them and so on " * 6 + "- yes: it is", answer="yes", options=("yes", "no")
    )
    question = Question.read(TOKENIZER, example)
    (scores,) = keep_scores(start.cfg, wide, start.reader(TLM_RECIPE.score.row_tokens), [question])
    tiny = TinyLm(
        cfg=start.cfg, params=jax.device_get(wide), levels=TLM_RECIPE.levels,
        prompt_ratios=TLM_RECIPE.prompt_ratios, mark_ids=start.mark_ids,
        row_tokens=TLM_RECIPE.score.row_tokens, tokenizer=start.own,
    )  # fmt: skip
    message = dataclasses.replace(example, answer="", options=())
    served = TinyPlanner(tiny, TLM_RECIPE.levels).scores(prompt_tokens(TOKENIZER, message))
    assert len(scores) > tiny.row_tokens
    np.testing.assert_allclose(served, scores, atol=1e-4)


def test_the_encoder_has_a_row_for_every_token_of_the_model():
    """However many the recipe's own family has; behind them stand the marks that no tokenizer reserves."""
    vocab_size = 151_936
    tokenizer = types.SimpleNamespace(vocab_size=vocab_size, encode=lambda text, **_: [0, 1])
    start = Start.of(TinyLmRecipe.load("small"), tokenizer)  # pyright: ignore[reportArgumentType]
    assert start.cfg.encoder.vocab_size == vocab_size + len(marks())
    assert start.params["embed.tokens"].shape[0] == vocab_size + len(marks())
    assert start.mark_ids[0] == vocab_size
