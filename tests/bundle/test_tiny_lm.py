"""A tiny LM in a bundle: the round trip, and everything malformed."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxllm.bundle import Bundle, Part
from jaxllm.bundle.levels import elastic_parts
from jaxllm.bundle.tiny_lm import read_tiny_lm, tiny_lm_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import BundleError, ConfigError
from tests.tiny import VOCAB_SIZE, tiny_tokenizer, write_tiny_bundle
from tests.tiny_tlm import random_tlm, tiny_lm

LADDER = Ladder(levels=(50, 100))
TINY_LM = tiny_lm((50, 100), (0.2, 0.5, 1))


def written(path, parts, *, ladder=LADDER):
    return Bundle.open(write_tiny_bundle(path / "m.jaxllm", parts={**elastic_parts(ladder), **parts}))


@pytest.mark.parametrize("own", [False, True])
def test_survives_the_file(tmp_path, own):
    tiny = dataclasses.replace(TINY_LM, tokenizer=tiny_tokenizer() if own else None, row_tokens=48)
    bundle = written(tmp_path, tiny_lm_parts(tiny, {"made": "here"}))
    again = read_tiny_lm(bundle)
    assert again is not None
    for field in ("cfg", "levels", "prompt_ratios", "mark_ids", "row_tokens", "tokenizer"):
        assert getattr(again, field) == getattr(tiny, field)
    assert again.params.keys() == tiny.params.keys()
    for name, value in tiny.params.items():
        np.testing.assert_array_equal(again.params[name], value)
    bundle.verify()


@pytest.mark.parametrize(("window", "rows"), [(64, 64), (512, 256)])
def test_a_bundle_that_does_not_say_its_rows_has_those_of_its_version(tmp_path, window, rows):
    cfg = dataclasses.replace(
        TINY_LM.cfg, encoder=dataclasses.replace(TINY_LM.cfg.encoder, window_tokens=window)
    )
    tiny = dataclasses.replace(TINY_LM, cfg=cfg, params=random_tlm(cfg))
    part = tiny_lm_parts(tiny)["tiny-lm"]
    told = {name: each for name, each in part.facts.items() if name != "row_tokens"}
    again = read_tiny_lm(written(tmp_path, {"tiny-lm": Part(told, part.arrays)}))
    assert again is not None
    assert again.row_tokens == rows


def test_none_and_one_of_a_bundle_without_levels(tmp_path):
    assert read_tiny_lm(written(tmp_path, {})) is None
    bundle = Bundle.open(write_tiny_bundle(tmp_path / "m.jaxllm", parts=tiny_lm_parts(TINY_LM)))
    with pytest.raises(BundleError, match=r"lacks \[50\]"):
        read_tiny_lm(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": (100, 50)}, "levels must be ascending"),
        ({"levels": (100,)}, "its 2 levels"),
        ({"prompt_ratios": (0, 0.5, 1)}, r"prompt ratios must be ascending numbers in \(0, 1\]"),
        ({"mark_ids": (1,) * 18}, "18 different tokens"),
        ({"mark_ids": tuple(range(VOCAB_SIZE - 17, VOCAB_SIZE + 1))}, "18 different tokens"),
        ({"row_tokens": 65}, "rows must have 3 to 64 tokens"),
        ({"params": {}}, "disagree on"),
        ({"params": {**TINY_LM.params, "embed.types": np.zeros((2, 9), np.float32)}}, "embed.types must be"),
        ({"params": {**TINY_LM.params, "score.keep": np.zeros((1, 16), np.int8)}}, "got int8"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY_LM, **change)


def forged(facts: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Part]:
    part = tiny_lm_parts(TINY_LM)["tiny-lm"]
    told = {name: each for name, each in {**part.facts, **facts}.items() if each != "missing"}
    return {"tiny-lm": Part(told, {**part.arrays, **arrays})}


@pytest.mark.parametrize(
    ("facts", "arrays", "message"),
    [
        ({"config": "missing"}, {}, "config"),
        ({"config": {"encoder": 1}}, {}, "malformed"),
        ({"levels": 5}, {}, "malformed"),
        ({"mark_ids": ["a"] * 18}, {}, "for its marks"),
        ({"levels": [60, 100]}, {}, r"lacks \[60\]"),
        ({"own_tokenizer": True}, {}, "disagree on whether it has a tokenizer"),
        ({"own_tokenizer": True}, {"tokenizer": np.zeros(3, np.uint8)}, "tokenizer is malformed"),
        ({"own_tokenizer": True}, {"tokenizer": np.zeros(3, np.float32)}, "must be bytes"),
        ({}, {"score.keep": np.zeros((1, 9), np.float32)}, "must be floats of shape"),
        ({}, {"more": np.zeros(1, np.float32)}, "disagree on more"),
    ],
)
def test_forged_parts_are_refused(tmp_path, facts, arrays, message):
    bundle = written(tmp_path, forged(facts, arrays))
    with pytest.raises(BundleError, match=message):
        read_tiny_lm(bundle)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    encoder = dataclasses.replace(TINY_LM.cfg.encoder, vocab_size=VOCAB_SIZE - 1)
    cfg = dataclasses.replace(TINY_LM.cfg, encoder=encoder)
    small = dataclasses.replace(TINY_LM, cfg=cfg, params=random_tlm(cfg))
    with pytest.raises(BundleError, match="it is of another model"):
        read_tiny_lm(written(tmp_path, tiny_lm_parts(small)))
