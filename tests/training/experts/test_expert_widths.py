"""Calibration of tiny mixtures on a text, and on pairs: losses, widths within a loss, and the bundle."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import pre_tokenizers

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import copied_parts, expert_facts, read_path_counts
from jaxllm.cli.main import cli
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import decoder, encoder_decoder
from jaxllm.models.parameters import ENCODER, param_specs
from jaxllm.prepare import prepare
from jaxllm.quant import dequantize
from jaxllm.training import calibration
from jaxllm.training.calibration import BundleOutput, ExpertWidthsRecipe, PairWidthsRecipe, WidthTarget
from jaxllm.training.experts import expert_widths as room
from jaxllm.training.experts.expert_widths import _split_pairs, quantize_experts, quantize_seq2seq_experts
from jaxllm.training.experts.measures import (
    PairPerplexity,
    PairRouge,
    TextPerplexity,
    WidthLosses,
    pair_visits,
)
from jaxllm.training.loop.fitting import FrozenModel
from jaxllm.training.seq2seq.forward import encode_rows
from jaxllm.training.seq2seq.pairs import TextPairs, read_pair_files
from jaxllm.training.seq2seq.run import Translator, pair_tokenizer, write_seq2seq
from tests.tiny import BEGIN_ID, TINY, tiny_params, write_tiny_folder
from tests.training.seq2seq.tiny import SWITCH, T5, spoken, tiny_recipe
from tests.training.tiny_runs import quiet

CFG = dataclasses.replace(
    TINY, model_type="qwen3_moe", qk_norm=True, layers=2, attention_windows=(), experts=4,
    experts_per_token=2, expert_ffn_size=32, sparse_layers=(True, True),
)  # fmt: skip
PIECES = sorted(pre_tokenizers.ByteLevel.alphabet())
RECIPE = ExpertWidthsRecipe(tokens=2048, row_tokens=32, batch=16)


# Letters that are a token each.
LETTERS = "abcdfgijkmnopqrs"


@pytest.fixture(scope="module")
def params():
    """Sure of what comes next. One expert of a layer matters far more than the others."""
    found = {name: np.array(value) for name, value in tiny_params(CFG).items()}
    found["head"] *= 20
    for name in found:
        if ".experts." in name:
            found[name][2] *= 4
        if name.endswith("router"):
            found[name] *= 3
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, params):
    return write_tiny_folder(tmp_path_factory.mktemp("mixture"), cfg=CFG, params=params)


@pytest.fixture(scope="module")
def text(tmp_path_factory, params):
    """What the model itself would say, so that whatever else it becomes loses."""

    @jax.jit
    def scores(tokens):
        hidden = decoder.forward_documents(params, tokens, cfg=CFG, differentiable=False)
        return decoder.logits(params, hidden, cfg=CFG)

    allowed = np.array([PIECES.index(letter) for letter in LETTERS])
    draw, tokens = np.random.default_rng(0), np.zeros((96, 48), np.int32)
    tokens[:, 0] = BEGIN_ID
    for at in range(1, tokens.shape[1]):
        chances = np.asarray(scores(tokens))[:, at - 1, allowed]
        tokens[:, at] = allowed[np.argmax(chances + draw.gumbel(size=chances.shape), axis=-1)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join("".join(PIECES[token] for token in row[1:]) for row in tokens))
    return path


@pytest.fixture(autouse=True)
def _little_text(monkeypatch):
    for module in (room, calibration):
        monkeypatch.setattr(module, "LEAST_TOKENS", 128)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Losses are measured once for all tests."""
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture(scope="module")
def pair_run(tmp_path_factory):
    """Those of pairs, likewise."""
    return tmp_path_factory.mktemp("pairs") / "run"


def calibrated(folder, text, run_dir, out, **how):
    target, out = WidthTarget(**how), BundleOutput(out)
    return quantize_experts(RECIPE, folder, out, quiet(run_dir), target=target, texts=[text])


@pytest.mark.slow
def test_widths_keep_the_loss(folder, text, run_dir, tmp_path):
    out = tmp_path / "mixed.jaxllm"
    most = calibrated(folder, text, run_dir, out, uniform=2)["loss"] / 2
    assert calibrated(folder, text, run_dir, out, most_loss=10.0)["widths"] == {"2": 8}
    facts = calibrated(folder, text, run_dir, out, most_loss=most)
    assert 0 < facts["loss"] <= most
    assert 0 < facts["held_out_loss"] < 3 * most
    assert 0 < facts["lowered"] < 8
    assert facts["widths"] == {"2": facts["lowered"], str(facts["upper"]): 8 - facts["lowered"]}
    with Bundle.open(out) as bundle:
        assert bundle.layout.experts_apart
        assert expert_facts(bundle)["loss"] == facts["loss"]
        counts = read_path_counts(bundle)
        assert counts.alone.sum() == 2 * 2 * facts["tokens"]
        bits = [
            bundle.layout.tensors[f"layers.{layer}.experts.{expert}.up"].bits
            for layer in range(2)
            for expert in range(4)
        ]
        assert bits.count(2) == facts["lowered"]
        # The heavy expert of the first layer costs most.
        assert bits[2] == facts["upper"]


def test_the_loss_of_one_expert(folder, text, run_dir, tmp_path):
    """What a model with that one expert's weights replaced loses, and nothing where none is."""
    calibrated(folder, text, run_dir, tmp_path / "a.jaxllm", uniform=32)
    frozen = FrozenModel.read(folder)
    batches, _ = room._split(room.TokenizedDocuments.read(run_dir / "tokens"), RECIPE)
    text = TextPerplexity(frozen.cfg, batches)
    losses = WidthLosses(frozen.cfg, frozen.params, text, tmp_path / "losses.json")
    assert losses.loss_of(np.full((2, 4), 32)) == 0.0
    alone = np.full((2, 4), 32)
    alone[0, 2] = 2
    with_one = losses._with_widths(alone)
    changed = [name for name in with_one if not np.array_equal(with_one[name], frozen.params[name])]
    assert changed == [f"layers.0.experts.{part}" for part in ("gate", "up", "down")]
    different = np.asarray(with_one[changed[0]]) != np.asarray(frozen.params[changed[0]])
    assert different.any(axis=(1, 2)).tolist() == [False, False, True, False]
    assert losses.loss_of(alone) > losses.loss_of(np.where(alone == 2, 8, alone))


@pytest.mark.slow
def test_a_bundle_is_calibrated_as_its_weights_are(folder, text, tmp_path):
    """Experts get narrower, never wider; all else, and who keeps its width, stays byte for byte."""
    source, out, run = tmp_path / "source.jaxllm", tmp_path / "out.jaxllm", tmp_path / "run"
    prepare(folder, source, weights="int8")
    facts = calibrated(source, text, run, out, uniform=8)
    assert facts["loss"] < 0.005
    with Bundle.open(source) as together, Bundle.open(out) as apart:
        before, after = together.load(), apart.load()
        for name in param_specs(CFG):
            whole = [dequantize(each[name], np.dtype(np.float32)) for each in (before, after)]
            np.testing.assert_array_equal(*whole)
        assert read_path_counts(apart).alone.sum() == 2 * 2 * facts["tokens"]
    lossy = calibrated(source, text, run, out, uniform=2)
    assert lossy["loss"] > facts["loss"]
    assert lossy["widths"] == {"2": 8}
    # What is apart already may get narrower still, not wider.
    again = calibrated(out, text, tmp_path / "again", tmp_path / "again.jaxllm", uniform=2)
    assert again["widths"] == {"2": 8}
    with pytest.raises(ConfigError, match="has experts of 2 bits, and 4 would be larger, not better"):
        calibrated(out, text, tmp_path / "wider", tmp_path / "wider.jaxllm", uniform=4)


def test_refusals(folder, text, run_dir, model, tmp_path):
    out, short, other = tmp_path / "a.jaxllm", tmp_path / "short.txt", tmp_path / "other.txt"
    short.write_text("hello there")
    calibrated(folder, text, run_dir, out, uniform=32)
    out.unlink()
    other.write_text("hello there\n\n" + text.read_text())
    for source, of, where, how, message in (
        (folder, text, run_dir, {"most_loss": 1e-9}, r"at most 0\.0\d%: the least, by 8 bits .* allow"),
        (folder, text, run_dir, {"uniform": 3}, r"among \(2, 4, 8, 16, 32\), got 3"),
        (folder, text, run_dir, {"most_loss": 0.0}, "must be positive"),
        (folder, other, run_dir, {}, "holds another run, it differs in the documents"),
        (folder, short, tmp_path / "run", {}, r"the text has \d+ tokens; .* give more text"),
        (model, text, tmp_path / "run", {}, "no mixture of experts; `jaxllm prepare`"),
    ):
        with pytest.raises(ConfigError, match=message):
            calibrated(source, of, where, out, **how)
    with pytest.raises(CheckpointError, match="no such file or folder; give a Hugging Face"):
        calibrated(out, text, tmp_path / "run", tmp_path / "b.jaxllm")
    assert not out.exists()


# An encoder-decoder: by the perplexity and by Rouge-2 of pairs that it would say.
PAIR_RECIPE = PairWidthsRecipe(tokens=2048, batch_tokens=512, answer_tokens=12)
PREFIX = "number to word:"
MIXTURE = {**SWITCH, "num_experts": 4, "num_layers": 4, "num_sparse_encoder_layers": 2}


@pytest.fixture(scope="module")
def switch(tmp_path_factory):
    """Sure of what comes next, and says words alone, since Rouge is of words."""
    recipe = tiny_recipe(MIXTURE)
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
def translator(switch):
    return Translator.read(switch)


@pytest.fixture(scope="module")
def pairs(translator):
    """What the model itself would say, so that whatever else it becomes loses."""
    sources = [spoken(n) for n in range(200, 290)]
    answers = translator.translate(translator.encode([f"{PREFIX} {each}" for each in sources]), 12)
    said = [translator.tokenizer.decode(each).replace("\n", " ").strip() for each in answers]
    found = [pair for pair in zip(sources, said, strict=True) if all(pair)]
    return TextPairs(found, [0] * len(found))


def calibrated_on_pairs(switch, pairs, pair_run, out, measure="perplexity", **how):
    how = {"pairs": pairs, "target": WidthTarget(**how), "measure": measure}
    return quantize_seq2seq_experts(PAIR_RECIPE, switch, BundleOutput(out), quiet(pair_run), **how)


@pytest.mark.slow
def test_widths_of_pairs_keep_the_loss(switch, pairs, pair_run, tmp_path):
    out = tmp_path / "mixed.jaxllm"
    most = calibrated_on_pairs(switch, pairs, pair_run, out, uniform=2)["loss"] / 2
    assert most > 0
    facts = calibrated_on_pairs(switch, pairs, pair_run, out, most_loss=most)
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
def test_widths_by_rouge(switch, pairs, pair_run, tmp_path):
    """The same run measures another loss besides."""
    facts = calibrated_on_pairs(switch, pairs, pair_run, tmp_path / "a.jaxllm", "rouge2", most_loss=1.0)
    assert facts["widths"] == {"2": 12}
    assert facts["rouge2"] > 0.5
    assert 0 < facts["loss"] < 1
    assert facts.keys() >= {"held_out_rouge2", "held_out_loss", "perplexity_loss", "held_out_perplexity_loss"}
    with pytest.raises(ConfigError, match="not learned this task"):
        PairRouge(Translator.read(switch), [], [], 12).loss(0.0, 0.0)
    # Floats, all experts at each width, and each alone beside others at 4 bits.
    assert len(json.loads((pair_run / "rouge2.json").read_text())) == 1 + 3 + 12


def test_one_expert_is_lowered_and_the_others_have_four_bits(translator, pairs, tmp_path):
    (rows, _, targets), _ = _split_pairs(pairs, translator, f"{PREFIX} ", PAIR_RECIPE)
    cfg = translator.cfg
    measure = PairPerplexity(cfg, rows)
    losses = WidthLosses(cfg, translator.params, measure, tmp_path / "losses.json")
    assert losses.shape == (3, 4)
    importance = losses.importance(lambda done, total: None)
    assert len(json.loads((tmp_path / "losses.json").read_text())) == 1 + 1 + 12
    four = np.full((3, 4), 4)
    alone = four.copy()
    alone[0, 1] = 2
    assert importance[0, 1] == pytest.approx(losses.loss_of(alone) - losses.loss_of(four))
    # An expert that no token visits matters to nobody.
    visits = pair_visits(cfg, rows, losses.params)
    assert np.all(importance[visits.loads == 0] == 0)
    # An encoder's expert is loaded at most once for a source, and one of them at least.
    assert visits.loads[:2].max() <= 1
    assert visits.loads[:2].sum(axis=1).min() >= 1
    assert visits.loads[2].sum() == pytest.approx(measure.tokens / len(targets))


def test_sources_use_up_the_capacity_of_experts(translator):
    """In rows of any length as where one source is served."""
    cfg, params = translator.cfg, translator.params
    encoder = dataclasses.replace(cfg.encoder, expert_capacity=3)
    tokens, valid = np.arange(2, 26, dtype=np.int32).reshape(2, 12), np.array([12, 7], np.int32)

    @functools.partial(jax.jit, static_argnames="cfg")
    def in_rows(cfg):
        return encode_rows(params, tokens, valid, cfg=cfg)[0]

    alone = jax.jit(
        functools.partial(encoder_decoder.encode, encoder_decoder.encoder_params(params), cfg=encoder)
    )
    rows = np.asarray(in_rows(dataclasses.replace(cfg, encoder=encoder)))
    for row, count in enumerate(valid):
        said = np.asarray(alone(tokens[row : row + 1], np.int32(count)))
        np.testing.assert_allclose(rows[row, :count], said[0, :count], rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(in_rows(cfg))[0] - rows[0]).max() > 0.01


def test_what_does_not_fit_is_refused(switch, pairs, pair_run, tmp_path):
    out = tmp_path / "a.jaxllm"
    few = TextPairs(pairs.texts[:5], [0] * 5)
    with pytest.raises(ConfigError, match=r"the targets of 5 pairs have .* give more pairs"):
        calibrated_on_pairs(switch, few, pair_run, out)
    long = TextPairs([(pairs.texts[0][0], "one " * 600), *pairs.texts], [0] * (1 + len(pairs.texts)))
    with pytest.raises(ConfigError, match="experts are measured on at most 512"):
        calibrated_on_pairs(switch, long, pair_run, out)
    with pytest.raises(ConfigError, match="measured by perplexity or rouge2, got 'bleu'"):
        calibrated_on_pairs(switch, pairs, pair_run, out, "bleu")
    dense, recipe = tmp_path / "t5", tiny_recipe(T5)
    tokenizer = pair_tokenizer(TextPairs([("1", "one two three four five six seven")] * 9, [0] * 9), recipe)
    write_seq2seq(dense, recipe, tokenizer, tiny_params(recipe.cfg))
    with pytest.raises(ConfigError, match="no mixture of experts"):
        calibrated_on_pairs(dense, pairs, pair_run, out)
    with pytest.raises(ConfigError, match=r"is a decoder alone .* --text instead of --pairs"):
        calibrated_on_pairs(write_tiny_folder(tmp_path / "decoder"), pairs, pair_run, out)


def test_the_command(switch, pairs, tmp_path):
    files = [tmp_path / "source.txt", tmp_path / "target.txt"]
    for file, texts in zip(files, zip(*pairs.texts, strict=True), strict=True):
        file.write_text("\n".join(texts))
    assert read_pair_files(*files).texts == list(pairs.texts)
    words = ["calibrate", "experts", switch, "-o", tmp_path / "out.jaxllm", "--run", tmp_path / "run"]

    def said(*more):
        return CliRunner().invoke(cli, [str(each) for each in (*words, *more)], catch_exceptions=False)

    with pytest.raises(ConfigError, match="give them by --pairs"):
        said()
    assert said("--measure", "rouge2").exit_code == 2
    got = said("--pairs", *files, "--prefix", PREFIX, "--expert-bits", 4)
    assert got.exit_code == 0, got.output
    assert json.loads(got.stdout)["widths"] == {"4": 12}
