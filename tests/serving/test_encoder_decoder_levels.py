"""Levels of encoder-decoders: units of both sides in order, and sub-models as counts of them."""

import dataclasses
import re

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import elastic_parts, read_ladder, read_order
from jaxllm.elastic.ladder import Ladder, layer_parameters, sub_config
from jaxllm.elastic.units import UnitOrder, order_of_scores, reorder
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.models.architectures import architecture
from jaxllm.models.parameters import ENCODER
from tests import tiny, tiny_encdec
from tests.serving.test_encoder_decoders import LONG, SMALL, greedy
from tests.tiny_variants import ENCODER_DECODERS

TEXT = "hello the hello"
# The encoder shrinks by other units than the decoder.
LADDER = Ladder(levels=(70, 100), encoder=Ladder(levels=(70, 100), anchors=(0,)))
BART = {**ENCODER_DECODERS["bart"][1], "model_type": "bart", "vocab_size": tiny.VOCAB_SIZE}
CFGS = {"t5": tiny_encdec.TINY_T5, "bart": architecture("bart").config_from_hf(BART)}


def scores(cfg, seed, lead=""):
    draw, kinds = np.random.default_rng(seed), {"groups": cfg.kv_heads, "neurons": cfg.ffn_size}
    kinds |= {} if lead else {"cross": cfg.kv_heads}
    found = {f"{lead}{kind}.{at}": draw.random(n) for kind, n in kinds.items() for at in range(cfg.layers)}
    return found if lead else found | scores(cfg.encoder, seed + 1, ENCODER)


def ordered(cfg):
    """An order of random scores, and the parameters in it."""
    order = order_of_scores(cfg, scores(cfg, 2))
    return order, dict(reorder(cfg, tiny.tiny_params(cfg).items(), order))


def write(path, cfg, params, weights="f32", **parts):
    return tiny.write_tiny_bundle(
        path, weights, cfg=cfg, params=params, tokenizer=tiny_encdec.tokenizer(), name="tiny", **parts
    )


def without(params, cfg, level):
    """The whole model's parameters in which the units that a level lacks add nothing."""
    found = {name: np.array(each) for name, each in params.items()}
    for lead, side in (("", level), ("encoder.", level.encoder)):
        for layer in range(side.layers):
            units = side.units(layer)
            counts = {"attn.o": units.kv_heads, "cross.o": units.kv_heads, "ffn.down": units.neurons}
            for name, count in counts.items():
                if (full := f"{lead}layers.{layer}.{name}") in found:
                    found[full][count:] = 0
    return found


@pytest.mark.parametrize("family", CFGS)
def test_levels_answer_as_the_sub_models_of_both_sides(family, tmp_path):
    cfg = CFGS[family]
    order, params = ordered(cfg)
    level = sub_config(cfg, LADDER, 70)
    for side, whole in ((level, cfg), (level.encoder, cfg.encoder)):
        assert layer_parameters(side) <= 0.7 * layer_parameters(whole)
    # Each side has a ladder of its own: the encoder's anchor is whole.
    assert level.encoder.units(0) == cfg.encoder.units(0) != level.encoder.units(1)
    assert level.units(0) == level.units(1)
    assert level.whole == cfg
    path = write(tmp_path / "elastic.jaxllm", cfg, params, parts=elastic_parts(LADDER, order=order))
    engine = Engine.open(path, options=dataclasses.replace(SMALL, levels=(70,)))
    source, start = engine.tokenizer.encode(TEXT), [tiny.BEGIN_ID]
    # In order the whole model says what it said before.
    plain = write(tmp_path / "plain.jaxllm", cfg, tiny.tiny_params(cfg))
    assert engine.generate(TEXT, LONG).tokens == greedy(plain, source, start, 12)
    small = write(tmp_path / "small.jaxllm", cfg, without(params, cfg, level))
    answer = engine.at(70).generate(TEXT, LONG).tokens
    assert answer == greedy(small, source, start, 12) != engine.generate(TEXT, LONG).tokens
    engine.close()
    with Bundle.open(path) as bundle:
        assert read_ladder(bundle) == LADDER
        found = read_order(bundle)
    np.testing.assert_array_equal(found.cross[1], order.cross[1])
    np.testing.assert_array_equal(found.encoder.neurons[0], order.encoder.neurons[0])


def test_levels_of_weights_in_blocks_share_buckets(tmp_path):
    cfg = tiny_encdec.TINY_T5
    _, params = ordered(cfg)
    path = write(tmp_path / "int8.jaxllm", cfg, params, "int8", parts=elastic_parts(LADDER))
    engine = Engine.open(path, options=dataclasses.replace(SMALL, levels=(70,)))
    before = dict(engine.runner.buckets.bucket_ms)
    answers = [engine.at(each).generate(TEXT, LONG).tokens for each in (70, 100, 70)]
    assert answers[0] == answers[2] != answers[1]
    assert engine.runner.buckets.bucket_ms == before
    small = write(tmp_path / "small.jaxllm", cfg, without(params, cfg, sub_config(cfg, LADDER, 70)), "int8")
    whole = Engine.open(small, options=SMALL)
    assert whole.generate(TEXT, LONG).tokens == answers[0]
    engine.close()
    whole.close()
    # And so they do where layers take turns in memory: with too little, the message says how much would do.
    streamed = dataclasses.replace(SMALL, levels=(70,), memory_bytes=1)
    with pytest.raises(BudgetExceeded) as refused:
        Engine.open(path, options=streamed)
    least = int(re.search(r"at least ([\d,]+)", str(refused.value))[1].replace(",", ""))
    engine = Engine.open(path, options=dataclasses.replace(streamed, memory_bytes=least))
    assert engine.model.streamed is not None
    assert [engine.at(each).generate(TEXT, LONG).tokens for each in (70, 100, 70)] == answers
    engine.close()


def test_orders_and_ladders_of_other_models():
    cfg = tiny_encdec.TINY_T5
    order, params = ordered(cfg)
    with pytest.raises(ConfigError, match="of a decoder-only model, the model an encoder-decoder"):
        dict(reorder(cfg, params.items(), UnitOrder(order.groups, order.neurons)))
    mixed = dataclasses.replace(order, groups=(order.groups[0], order.groups[0][::-1]))
    with pytest.raises(ConfigError, match="with relative positions the kv groups of all layers"):
        dict(reorder(cfg, params.items(), mixed))
    some = scores(cfg, 0)
    del some["cross.0"]
    with pytest.raises(ConfigError, match=r"scores of 'cross\.0' are missing"):
        order_of_scores(cfg, some)
    with pytest.raises(ConfigError, match="the encoder's levels must be those of the decoder"):
        Ladder(levels=(70, 100), encoder=Ladder(levels=(30, 100)))
