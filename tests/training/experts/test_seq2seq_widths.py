"""Widths of the experts of a tiny Switch model, by perplexity and by Rouge-2 of pairs that it would say."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import copied_parts, expert_facts, read_path_counts
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError
from jaxllm.models import encoder_decoder
from jaxllm.models.parameters import ENCODER
from jaxllm.training import calibration
from jaxllm.training.calibration import BundleOutput, PairWidthsRecipe, WidthTarget
from jaxllm.training.experts import expert_widths
from jaxllm.training.experts.expert_widths import _split_pairs, quantize_seq2seq_experts
from jaxllm.training.experts.measures import PairPerplexity, PairRouge, WidthLosses, pair_visits
from jaxllm.training.seq2seq.forward import encode_rows
from jaxllm.training.seq2seq.pairs import TextPairs, read_pair_files
from jaxllm.training.seq2seq.run import pair_tokenizer, write_seq2seq
from jaxllm.training.seq2seq.translation import Translator
from tests.tiny import tiny_params, write_tiny_folder
from tests.training.seq2seq.tiny import SWITCH, T5, tiny_recipe
from tests.training.tiny_runs import quiet

RECIPE = PairWidthsRecipe(tokens=2048, batch_tokens=512, answer_tokens=12)
PREFIX = "number to word:"
WORDS = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
MODEL = {**SWITCH, "num_experts": 4, "num_layers": 4, "num_sparse_encoder_layers": 2}


@pytest.fixture(autouse=True)
def _few_pairs(monkeypatch):
    for module in (expert_widths, calibration):
        monkeypatch.setattr(module, "LEAST_TOKENS", 128)


def spoken(number):
    return " ".join(WORDS[int(digit)] for digit in str(number))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sure of what comes next, and says words alone, since Rouge is of words."""
    recipe = tiny_recipe(MODEL)
    params = {name: 3 * value if value.ndim > 1 else value for name, value in tiny_params(recipe.cfg).items()}
    # The source and experts outweigh the last token.
    params |= {name: 4 * params[name] for name in params if name.endswith((".cross.o", ".experts.down"))}
    texts = [(spoken(n), spoken(3 * n)) for n in range(100, 300)]
    tokenizer = pair_tokenizer(TextPairs(texts, [0] * len(texts)), recipe)
    pieces = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    others = [not (piece.startswith(" ") and piece.strip().isalpha()) for piece in pieces]
    params["embed.tokens"][: len(others)][others] *= 0.2
    path = tmp_path_factory.mktemp("switch") / "hf"
    write_seq2seq(path, recipe, tokenizer, params)
    return path


@pytest.fixture(scope="module")
def translator(folder):
    return Translator.read(folder)


@pytest.fixture(scope="module")
def pairs(translator):
    """What the model itself would say, so that whatever else it becomes loses."""
    sources = [spoken(n) for n in range(200, 290)]
    answers = translator.translate(translator.encode([f"{PREFIX} {each}" for each in sources]), 12)
    said = [translator.tokenizer.decode(each).replace("\n", " ").strip() for each in answers]
    found = [pair for pair in zip(sources, said, strict=True) if all(pair)]
    return TextPairs(found, [0] * len(found))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Losses are measured once for all tests."""
    return tmp_path_factory.mktemp("run") / "run"


def calibrated(folder, pairs, run_dir, out, measure="perplexity", **how):
    how = {"pairs": pairs, "target": WidthTarget(**how), "measure": measure}
    return quantize_seq2seq_experts(RECIPE, folder, BundleOutput(out), quiet(run_dir), **how)


@pytest.mark.slow
def test_widths_keep_the_loss(folder, pairs, run_dir, tmp_path):
    out = tmp_path / "mixed.jaxllm"
    most = calibrated(folder, pairs, run_dir, out, uniform=2)["loss"] / 2
    assert most > 0
    facts = calibrated(folder, pairs, run_dir, out, most_loss=most)
    assert facts["loss"] <= most
    assert 0 < facts["lowered"] < facts["experts"] == 12
    assert facts["measure"] == "perplexity"
    assert facts["held_out_perplexity"] > 1
    assert "rouge2" not in facts
    with Bundle.open(out) as bundle:
        assert bundle.layout.experts_apart
        assert expert_facts(bundle)["loss"] == facts["loss"]
        # Of each side, every token visits an expert at each layer.
        (part,) = copied_parts(bundle).values()
        of = {name.removeprefix(ENCODER): each for name, each in part.arrays.items() if ENCODER in name}
        decoder = read_path_counts(bundle)
        assert decoder.alone.sum(axis=1).tolist() == [facts["tokens"]]
        assert (len(of["alone"]), decoder.layers) == (2, 1)
        assert of["after_one"][1].sum() == of["alone"][0].sum()
        assert of["token_experts"].shape == (2, len(of["tokens"]), 1)


@pytest.mark.slow
def test_widths_by_rouge(folder, pairs, run_dir, tmp_path):
    """The same run measures another loss besides."""
    facts = calibrated(folder, pairs, run_dir, tmp_path / "a.jaxllm", "rouge2", most_loss=1.0)
    assert facts["widths"] == {"2": 12}
    assert facts["rouge2"] > 0.5
    assert 0 < facts["loss"] < 1
    assert facts.keys() >= {"held_out_rouge2", "held_out_loss", "perplexity_loss", "held_out_perplexity_loss"}
    # Floats, all experts at each width, and each alone beside others at 4 bits.
    assert len(json.loads((run_dir / "rouge2.json").read_text())) == 1 + 3 + 12


def test_one_expert_is_lowered_and_the_others_have_four_bits(translator, pairs, tmp_path):
    taken, _ = _split_pairs(pairs, translator, f"{PREFIX} ", RECIPE)
    cfg = translator.cfg
    measure = PairPerplexity(cfg, taken.rows)
    losses = WidthLosses(cfg, translator.params, measure, tmp_path / "losses.json")
    assert losses.shape == (3, 4)
    importance = losses.importance(lambda done, total: None)
    assert len(json.loads((tmp_path / "losses.json").read_text())) == 1 + 1 + 12
    four = np.full((3, 4), 4)
    alone = four.copy()
    alone[0, 1] = 2
    assert importance[0, 1] == pytest.approx(losses.loss_of(alone) - losses.loss_of(four))
    # An expert that no token visits matters to nobody.
    visits = pair_visits(cfg, taken.rows, losses.params)
    assert np.all(importance[visits.loads == 0] == 0)
    # An encoder's expert is loaded at most once for a source, and one of them at least.
    assert visits.loads[:2].max() <= 1
    assert visits.loads[:2].sum(axis=1).min() >= 1
    assert visits.loads[2].sum() == pytest.approx(measure.tokens / len(taken.targets))


def test_rouge_of_what_the_model_says_is_whole(translator, pairs):
    taken, _ = _split_pairs(pairs, translator, f"{PREFIX} ", RECIPE)
    judged = PairRouge(translator, taken.sources, taken.targets, RECIPE.answer_tokens)
    whole = judged.value(translator.params)
    assert whole > 0.5
    assert judged.loss(whole / 2, whole) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="not learned this task"):
        judged.loss(0.0, 0.0)


def test_sources_use_up_the_capacity_of_experts(translator):
    """In rows of any length as where one source is served."""
    cfg, params = translator.cfg, translator.params
    encoder = dataclasses.replace(cfg.encoder, expert_capacity=3)
    tokens, valid = np.arange(2, 26, dtype=np.int32).reshape(2, 12), np.array([12, 7], np.int32)

    @functools.partial(jax.jit, static_argnames="cfg")
    def in_rows(cfg):
        return encode_rows(params, tokens, valid, cfg=cfg)[0].hidden

    alone = jax.jit(
        functools.partial(encoder_decoder.encode, encoder_decoder.encoder_params(params), cfg=encoder)
    )
    rows = np.asarray(in_rows(dataclasses.replace(cfg, encoder=encoder)))
    for row, count in enumerate(valid):
        said = np.asarray(alone(tokens[row : row + 1], np.int32(count)))
        np.testing.assert_allclose(rows[row, :count], said[0, :count], rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(in_rows(cfg))[0] - rows[0]).max() > 0.01


def test_what_does_not_fit_is_refused(folder, pairs, run_dir, tmp_path):
    out = tmp_path / "a.jaxllm"
    few = TextPairs(pairs.texts[:5], [0] * 5)
    with pytest.raises(ConfigError, match=r"the targets of 5 pairs have .* give more pairs"):
        calibrated(folder, few, run_dir, out)
    long = TextPairs([(pairs.texts[0][0], "one " * 600), *pairs.texts], [0] * (1 + len(pairs.texts)))
    with pytest.raises(ConfigError, match="experts are measured on at most 512"):
        calibrated(folder, long, run_dir, out)
    with pytest.raises(ConfigError, match="measured by perplexity or rouge2, got 'bleu'"):
        calibrated(folder, pairs, run_dir, out, "bleu")
    dense, recipe = tmp_path / "t5", tiny_recipe(T5)
    tokenizer = pair_tokenizer(TextPairs([("1", "one two three four five six seven")] * 9, [0] * 9), recipe)
    write_seq2seq(dense, recipe, tokenizer, tiny_params(recipe.cfg))
    with pytest.raises(ConfigError, match="no mixture of experts"):
        calibrated(dense, pairs, run_dir, out)
    with pytest.raises(ConfigError, match=r"is a decoder alone .* --text instead of --pairs"):
        calibrated(write_tiny_folder(tmp_path / "decoder"), pairs, run_dir, out)


def test_the_command(folder, pairs, tmp_path):
    files = [tmp_path / "source.txt", tmp_path / "target.txt"]
    for file, texts in zip(files, zip(*pairs.texts, strict=True), strict=True):
        file.write_text("\n".join(texts))
    assert read_pair_files(*files).texts == list(pairs.texts)
    words = ["calibrate", "experts", folder, "-o", tmp_path / "out.jaxllm", "--run", tmp_path / "run"]

    def said(*more):
        return CliRunner().invoke(cli, [str(each) for each in (*words, *more)], catch_exceptions=False)

    with pytest.raises(ConfigError, match="give them by --pairs"):
        said()
    assert said("--measure", "rouge2").exit_code == 2
    assert said("--pairs", *files, "--dry-run", "H100").exit_code == 2
    got = said("--pairs", *files, "--prefix", PREFIX, "--expert-bits", 4)
    assert got.exit_code == 0, got.output
    assert json.loads(got.stdout)["widths"] == {"4": 12}
