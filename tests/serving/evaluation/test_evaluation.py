"""Evaluation: packed scores equal the engine's own, one sequence after another; what counts as right; and
perplexity by its definition, two models beside each other, and the experts of one."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm import Engine, EngineOptions
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.models.decoder import forward, logits
from jaxllm.quant import dequantize
from jaxllm.quant.parts import high_planes
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.evaluation.intervals import mean_interval, perplexity_interval
from jaxllm.serving.evaluation.tasks import (
    is_right,
    read_questions,
    run_task,
    score_branches_of,
    score_options,
)
from jaxllm.serving.evaluation.texts import expert_use, greedy_agreement, perplexity
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.steps.branching import Branching
from jaxllm.tasks import Task
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.questions import branching
from jaxllm.tasks.rouge import rouge
from jaxllm.text.prompts import prompt_ids
from jaxllm.text.tokenizer import Tokenizer
from tests.kernels.switching import needs_native
from tests.models.test_lora import MOE
from tests.serving.conftest import OPTIONS
from tests.serving.speculation.test_speculative import CFG, sharp
from tests.tasks.writing import write_lines
from tests.tiny import END_ID, TINY, tiny_params, tiny_tokenizer, write_tiny_bundle


def random_questions(count, context, seed=0, vocab=TINY.vocab_size):
    draw = np.random.default_rng(seed)

    def ids(size):
        return tuple(int(each) for each in draw.integers(0, vocab, size))

    questions = []
    for _ in range(count):
        trunk = ids(draw.integers(1, context // 2))
        sizes = draw.integers(1, context - len(trunk) + 2, draw.integers(1, 7))
        questions.append(Branching(trunk, tuple(ids(size) for size in sizes)))
    return questions


def one_by_one(engine, question):
    scorer = Scorer(engine.runner)
    scorer.prepare(engine.options.context_tokens)
    sums = []
    for branch in question.branches:
        whole = [*question.trunk, *branch]
        scores = scorer.score(whole[:-1], whole[1:])
        sums.append(scores[len(question.trunk) - 1 :].sum(dtype="float64"))
    return sums


def assert_equal_scores(engine, questions, **tolerance):
    scores = score_options(engine, questions)
    assert len(scores) == len(questions)
    for question, each in zip(questions, scores, strict=True):
        np.testing.assert_allclose(each, one_by_one(engine, question), **tolerance)


def test_equal_to_sequential_scores(engine, compiles):
    questions, seen = random_questions(40, 128), []
    assert_equal_scores(engine, questions, rtol=1e-4, atol=1e-3)
    with compiles() as count:
        score_options(engine, questions, progress=lambda *call: seen.append(call), stage="x")
    assert count() == 0, "something compiles twice"
    mine = [call[1:] for call in seen if call[0] == "x"]
    total = sum(len(branch) for each in questions for branch in each.branches)
    assert len(mine) > 1
    assert mine == sorted(mine)
    assert mine[-1] == (total, total)
    with pytest.raises(ContextOverflow, match="129 tokens"):
        score_options(engine, [Branching((1,) * 128, ((1, 2),))])
    assert score_options(engine, []) == []
    # What stands beside a question plays no role.
    reversed_ = score_options(engine, questions[::-1])[::-1]
    for a, b in zip(score_options(engine, questions), reversed_, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.campaign)])
def test_equal_at_the_width_that_is_served(tmp_path, weights):
    """In floats every family is: `test_rooms.py`."""
    options = EngineOptions(context_tokens=64, chunk_tokens=(32,), score_tokens=256)
    engine = Engine.open(write_tiny_bundle(tmp_path / "m", weights), options=options, warm_up=False)
    # The engine's cache holds halves where native kernels serve quantized weights.
    assert_equal_scores(engine, random_questions(12, 64), rtol=5e-3, atol=5e-2)


# From a question to ids


CHAT = TaskExample(system="S", user="U", options=("he", "hell"), answer="he")


def test_a_chat_ends_with_the_end_token():
    tokenizer = Tokenizer(tiny_tokenizer())
    question = branching(tokenizer, CHAT)
    assert list(question.trunk) == tokenizer.encode_chat(CHAT.messages()) == prompt_ids(tokenizer, CHAT)
    assert [tokenizer.decode(branch) for branch in question.branches] == ["he", "hell"]
    assert all(branch[-1] == END_ID for branch in question.branches)
    # A template without a system turn gets it with the question; without a template it is plain text.
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[0].content }}>"
    )
    tokenizer = Tokenizer(dataclasses.replace(tiny_tokenizer(), chat_template=template))
    assert tokenizer.decode(prompt_ids(tokenizer, CHAT)) == "S\nU>"
    tokenizer = Tokenizer(tiny_tokenizer(chat=False))
    question = branching(tokenizer, CHAT)
    assert tokenizer.decode(question.trunk) == "S\nU\n"
    assert all(branch[-1] != END_ID for branch in question.branches)
    # An option that joins the question is scored from before the join.
    tokenizer = Tokenizer(tiny_tokenizer())
    example = TaskExample(user="a th", options=("e", "at"), answer="e", form="text")
    question = branching(tokenizer, example)
    # " t" + "he" is one token (the merge "Ġthe"), " th" two: the last place where both agree is behind "a".
    for option, branch in zip(example.options, question.branches, strict=True):
        assert [*question.trunk, *branch] == tokenizer.encode(f"a th{option}")
    assert tokenizer.decode(question.trunk) == "a"
    files = tiny_tokenizer()
    plain = json.dumps({**json.loads(files.tokenizer_json), "post_processor": None})
    tokenizer = Tokenizer(dataclasses.replace(files, tokenizer_json=plain))
    with pytest.raises(ConfigError, match="without a token"):
        prompt_ids(tokenizer, TaskExample(user="", answer="x", form="text"))


# Results of tasks: what counts as right, what is left out, and Rouge.


def task(score="accuracy", **fields):
    return Task("tiny", "a tiny task", lambda data, split: iter(()), score, **fields)


def text(user, *options, answer=None):
    return TaskExample(user=user, options=options, answer=answer or options[0], form="text")


def test_the_first_of_equally_likely_options_wins(engine, monkeypatch):
    def scored(scores):
        monkeypatch.setattr("jaxllm.serving.evaluation.tasks.score_options", lambda *_, **__: scores)

    scored([np.zeros(2), np.zeros(2)])
    result, (first, second) = run_task(engine, task(), [text("x", "a", "b"), text("x", "a", "b", answer="b")])
    assert (first["prediction"], second["prediction"]) == ("a", "a")
    assert result.scores == {"accuracy": 0.5}
    scored([np.array([-3.0, -4.0])])
    result, _ = run_task(engine, task(per_byte=True), [text("x", " ab", " abcdef")])
    assert result.scores == {"accuracy": 1.0, "accuracy_per_byte": 0.0}


def test_a_greedy_continuation_is_right(engine):
    trunk = tuple(engine.tokenizer.encode("the cat"))
    said = tuple(engine.generate(trunk, GenerationConfig(max_tokens=3, ignore_eos=True)).tokens)
    wrong = (said[0] + 1) % engine.cfg.vocab_size
    question = Branching(trunk, (said, said[:1], (*said[:2], wrong), (wrong, *said[1:])))
    (found,) = score_branches_of(engine, [question])
    assert found.greedy.tolist() == [True, True, said[2] == wrong, False]
    examples = [text("the cat", answer=chr(each)) for each in range(33, 127)]
    result, predictions = run_task(engine, task("continuation"), examples)
    scores = score_branches_of(engine, [branching(engine.tokenizer, text("the cat", "x"))])
    assert predictions[ord("x") - 33]["log_probability"] == pytest.approx(scores[0].sums[0], abs=1e-4)
    assert (result.scores["accuracy"], result.chance) == (np.mean([p["accuracy"] for p in predictions]), None)


def test_intervals():
    # Wilson's of 8 of 10, and the bound of none of 10, z^2 / (n + z^2).
    assert mean_interval(np.array([1.0] * 8 + [0.0] * 2)) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert mean_interval(np.zeros(10)) == pytest.approx((0, 0.2775), abs=1e-4)
    draw = np.random.default_rng(0)
    low, high = mean_interval(draw.normal(0.5, 0.1, 400))
    assert (high - low, (high + low) / 2) == pytest.approx((4 * 0.1 / 20, 0.5), rel=0.2)
    # Equal neighbours are worth one token: blocks widen the interval of text.
    losses = draw.exponential(1.0, 4000)
    alone, runs = (np.diff(np.log(perplexity_interval(each)))[0] for each in (losses, np.sort(losses)))
    assert alone == pytest.approx(4 / 4000**0.5, rel=0.2)
    assert runs > 4 * alone


def test_facts(engine):
    long = text("x" * 200, "a", "b")
    examples = [text("x", "a", "b"), text("y", "a", "b"), text("z", "b", "a", "c", "d"), long]
    result, predictions = run_task(engine, task(), examples)
    assert (result.examples, result.skipped, len(predictions)) == (3, 1, 3)
    assert result.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)
    assert result.majority == pytest.approx(2 / 3)
    assert result.tokens > 0
    # Where nothing fits there is nothing to tell.
    for kind in ("accuracy", "continuation", "exact_match", "rouge"):
        result, predictions = run_task(engine, task(kind), [long])
        assert (result.scores, result.examples, result.skipped, predictions) == ({}, 0, 1, [])


@pytest.mark.parametrize("kind", ["exact_match", "rouge"])
def test_written_answers(engine, kind):
    prompt = "the cat"
    said = engine.generate(prompt).text[:4]
    examples = [TaskExample(user=prompt, answer="x", form="text"), TaskExample(user=prompt, answer="x")]
    result, predictions = run_task(engine, task(kind, answer_tokens=4), examples)
    assert result.examples == 2
    assert said.startswith(predictions[0]["prediction"][:3])
    # The answer needs room too.
    result, _ = run_task(engine, task(kind, answer_tokens=124), examples)
    assert result.skipped == 2


def test_right_answers_and_rouge():
    form: Any
    for answer, form, right, wrong in (
        ("tap A", "chat", " tap A\n", "tap A now"),
        (" sun", "text", ' sun," he said', " sunny"),
        (" don't", "text", " don't.", ""),
    ):
        example = TaskExample(user="x", answer=answer, form=form)
        assert [is_right(example, said) for said in (right, wrong)] == [True, False]
    assert rouge(["The cat sat on a mat."], "the cat sat on a mat") == dict.fromkeys(
        ("rouge1", "rouge2", "rougeL"), 1.0
    )
    assert set(rouge(["the cat"], "").values()) == {0.0}
    # 2 of 2 words, of 4 in the reference; 1 of 1 pair, of 3.
    found = rouge(["a red cat ran"], "red cat")
    assert found == pytest.approx({"rouge1": 2 / 3, "rouge2": 1 / 2, "rougeL": 2 / 3})
    assert rouge(["dogs", "a red cat ran"], "red cat") == found


def test_questions(tmp_path):
    write_lines(
        tmp_path / "tasks/sst2/valid.jsonl", *({"text": f"{n}", "label": "positive"} for n in range(9))
    )
    found = read_questions(["sentiment", "all"], tmp_path)
    assert list(found.examples) == ["sentiment"]
    assert "sentiment" not in found.missing
    assert [each.user for each in found.examples["sentiment"]] == [f"{n}" for n in range(9)]
    sample = read_questions(["sentiment"], tmp_path, 3).examples["sentiment"]
    # A larger sample begins with the smaller one.
    assert read_questions(["sentiment"], tmp_path, 5).examples["sentiment"][:3] == sample
    (tmp_path / "tasks/sst2/valid.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no validation question"):
        read_questions(["sentiment"], tmp_path)


# Texts.


DOCUMENTS = ["the cat sat on the mat. " * 8, "a dog", "ran and ran to the end of the road. " * 5]


def reference(engine, documents, window):
    """Sum of negative log-likelihoods, and their number, from whole-window logits."""
    params = engine.model.bundle.load()

    @jax.jit
    def scored(tokens):
        hidden, _ = forward(params, tokens, cfg=engine.cfg)
        return jax.nn.log_softmax(logits(params, hidden, cfg=engine.cfg), axis=-1)

    loss, count = 0.0, 0
    for text in documents:
        ids = engine.tokenizer.encode(text)
        for at in range(0, len(ids) - 1, window):
            targets = ids[at + 1 : at + window + 1]
            inputs = np.zeros((1, window), np.int32)
            inputs[0, : len(targets)] = ids[at : at + len(targets)]
            scores = scored(inputs)
            loss -= sum(float(scores[0, i, token]) for i, token in enumerate(targets))
            count += len(targets)
    return loss, count


@pytest.mark.parametrize("window", [20, 128])
def test_equals_the_definition_for_windows_within_and_beyond_a_chunk(engine, window):
    seen = []
    result = perplexity(engine, DOCUMENTS, window_tokens=window, progress=lambda *call: seen.append(call))
    loss, count = reference(engine, DOCUMENTS, window)
    assert (result.tokens, result.documents) == (count, 3)
    assert result.perplexity == pytest.approx(math.exp(loss / count), rel=1e-5)
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert result.bits_per_byte == pytest.approx(loss / math.log(2) / size, rel=1e-5)
    scored = [call[1:] for call in seen if call[0] == "score"]
    assert scored == sorted(scored)
    assert scored[-1] == (count, count)
    with pytest.raises(ConfigError, match="no token to predict"):
        perplexity(engine, [""])
    for wrong in (-1, 129):
        with pytest.raises(ConfigError, match="window"):
            perplexity(engine, DOCUMENTS, window_tokens=wrong)


@needs_native
def test_high_planes_predict_as_a_model_of_their_own(tmp_path):
    options = EngineOptions(context_tokens=64, chunk_tokens=(32,))
    nested = Engine.open(
        write_tiny_bundle(tmp_path / "nested.jaxllm", "int8-nested", cfg=CFG, params=sharp(CFG)),
        options=options,
        warm_up=False,
    )
    params = {
        name: np.asarray(dequantize(weight, jnp.dtype(jnp.float32)))
        for name, weight in high_planes(nested.model.bundle.load()).items()
    }
    alone = Engine.open(
        write_tiny_bundle(tmp_path / "high.jaxllm", cfg=CFG, params=params), options=options, warm_up=False
    )
    high = perplexity(nested, DOCUMENTS, high_planes=True).perplexity
    both, expected = (perplexity(each, DOCUMENTS).perplexity for each in (nested, alone))
    # Activations are quantized in one of them alone.
    assert abs(high - expected) < 0.5 * abs(high - both)
    with pytest.raises(ConfigError, match=r"predict by its high planes, because it has f32 weights"):
        perplexity(alone, DOCUMENTS, high_planes=True)


def test_a_short_document_needs_no_graph_of_its_own(tiny_bundle):
    """Caches that other requests made ready, shorter than the window's, have no graph that scores."""
    options = EngineOptions(context_tokens=128, chunk_tokens=(32,), cache_tokens=(32, 128), decode_block=1)
    engine = Engine.open(tiny_bundle, options=options)
    assert perplexity(engine, ["a dog"], window_tokens=128).tokens == 5


TEXTS = ["hello there, all of you", "the hell with it " * 9, "x"]


def opened(path, **parts):
    return Engine.open(write_tiny_bundle(path, **parts), options=OPTIONS, warm_up=False)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    return opened(folder / "a"), opened(folder / "b", params=tiny_params(TINY, 5))


def test_a_model_agrees_with_itself_and_rarely_with_another(engines, tmp_path):
    first, second = engines
    same = greedy_agreement(first, first, TEXTS)
    assert same.agreement == 1.0
    assert same.right == same.other_right
    other = greedy_agreement(first, second, TEXTS)
    assert other.agreement < 0.3
    assert other.tokens == sum(len(first.tokenizer.encode(text)) - 1 for text in TEXTS)
    swapped = greedy_agreement(second, first, TEXTS)
    assert (swapped.agreement, swapped.right) == (other.agreement, other.other_right)
    files = tiny_tokenizer()
    renamed = files.tokenizer_json.replace('"<|user|>"', '"<|me|>"')
    stranger = opened(tmp_path / "other", tokenizer=dataclasses.replace(files, tokenizer_json=renamed))
    with pytest.raises(ConfigError, match="different tokenizers"):
        greedy_agreement(first, stranger, TEXTS)
    with pytest.raises(ConfigError, match="no experts"):
        expert_use(first, TEXTS)


def test_agreement_is_that_of_greedy_answers(engines):
    """Token by token: where the models agree, both would go on with the same token."""
    first, second = engines
    ids = first.tokenizer.encode(TEXTS[0])
    agreed = 0
    for end in range(1, len(ids)):
        heads = [Scorer(each.runner).predict(ids[:end], ids[1 : end + 1])[1][-1] for each in engines]
        agreed += heads[0] == heads[1]
    found = greedy_agreement(first, second, TEXTS[:1])
    assert found.agreement == pytest.approx(agreed / (len(ids) - 1))


@pytest.mark.slow
def test_experts_are_counted(tmp_path):
    engine = opened(tmp_path / "moe", cfg=MOE)
    use = expert_use(engine, TEXTS)
    tokens = [engine.tokenizer.encode(text) for text in TEXTS]
    assert use.tokens == sum(len(ids) - 1 for ids in tokens)
    assert np.sum(use.shares, axis=1) == pytest.approx([1.0, 1.0], abs=1e-3)
    assert (use.possible_paths, len(use.shares), len(use.shares[0])) == (16, 2, 4)
    assert use.least <= 1 <= use.most
    assert 0.1 < use.top_paths_share <= 1
    # A router that likes one expert leaves the others dead, but for a token's second choice.
    params = {
        name: np.zeros_like(each) if name.endswith(".router") else each
        for name, each in tiny_params(MOE).items()
    }
    even = expert_use(opened(tmp_path / "even", cfg=MOE, params=params), TEXTS)
    # Equal probabilities go to the lower ids: experts 0 and 1 alone, on one path.
    assert (even.dead, even.paths, even.top_paths_share) == (4, 1, 1.0)
    assert even.shares == ((0.5, 0.5, 0.0, 0.0),) * 2


def test_the_commands_report_agreement_and_routing(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("|".join(TEXTS))
    bundle = str(write_tiny_bundle(tmp_path / "moe", cfg=MOE))
    for command, models, shown, key in (
        ("agreement", [bundle, "-m", bundle], "agreement 100.0%", "agreement"),
        ("routing", ["-m", bundle], "experts: ", "paths"),
    ):
        arguments = ["eval", command, str(text), *models, "--separator", "|"]
        assert shown in CliRunner().invoke(cli, arguments, catch_exceptions=False).stdout
        facts = json.loads(CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False).stdout)
        assert facts[key] > 0
