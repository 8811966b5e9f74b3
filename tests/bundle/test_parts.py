"""Parts of a bundle: each comes back whole, and a malformed one is refused by name."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm
from jaxllm.bundle import Bundle, Part
from jaxllm.bundle.calibrations import (
    contexts_parts,
    prefill_facts,
    prefill_parts,
    read_contexts,
    read_prefill,
)
from jaxllm.bundle.levels import (
    Recovery,
    elastic_parts,
    read_ladder,
    read_order,
    read_recovery,
    release_recovery,
    require_level,
)
from jaxllm.bundle.tiny_lm import read_tiny_lm, tiny_lm_parts
from jaxllm.config import ModelConfig
from jaxllm.contexts.tolerance import Candidate, ContextCalibration
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.errors import BundleError, ConfigError
from jaxllm.int8_prefill.recipe import MOST_LOSS
from jaxllm.models.lora import LoraConfig, init_adapter
from tests.bundle.forging import rewritten
from tests.elastic.models import random_order
from tests.int8_prefill.calibrated import calibrated, outlying
from tests.tiny import TINY, VOCAB_SIZE, tiny_tokenizer, write_tiny_bundle
from tests.tiny_tlm import random_tlm, tiny_lm

LADDER = Ladder(levels=(50, 100), anchors=(1,))
ORDER = random_order(TINY)
TINY_LM = tiny_lm((50, 100), (0.2, 0.5, 1))
CHOSEN = Candidate("kivi", 32)


def adapter_of(cfg: ModelConfig) -> dict[str, Any]:
    return jax.device_get(init_adapter(cfg, LoraConfig(rank=2), jax.random.key(0)))


read_50 = functools.partial(read_recovery, level=50)


def contexts() -> ContextCalibration:
    rng = np.random.default_rng(0)
    shape = (TINY.layers, 3, 2)
    errors = {each: rng.random(shape, np.float32) for each in (Candidate("channel", 16), CHOSEN)}
    return ContextCalibration(chosen=CHOSEN, errors=errors, sensitivity=rng.random(shape[::2], np.float32))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts") / "plain.jaxllm"
    return write_tiny_bundle(path, "int8", params=outlying(), parts={"other": Part({"a": 1})})


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter = adapter_of(sub_config(TINY, LADDER, 50))
    parts = elastic_parts(LADDER, {50: Recovery(adapter, 2.0)}, order=ORDER, facts={"made": "here"})
    return write_tiny_bundle(tmp_path_factory.mktemp("elastic") / "tiny.jaxllm", parts=parts)


def same(found: Any, known: Any) -> None:
    """Equal values, including arrays in mappings and sequences."""
    if isinstance(known, dict):
        assert found.keys() == known.keys()
        for key, value in known.items():
            same(found[key], value)
    elif isinstance(known, tuple | list):
        for one, other in zip(found, known, strict=True):
            same(one, other)
    elif isinstance(known, np.ndarray):
        np.testing.assert_array_equal(found, known)
    else:
        assert found == known


def test_calibrations_come_back_and_weights_stay_byte_for_byte(plain: Path, tmp_path: Path) -> None:
    parts = prefill_parts(calibrated(), {"tokens": 7}) | contexts_parts(contexts(), {"tokens": 7})
    bundle = rewritten(plain, tmp_path / "m", parts)
    bundle.verify()
    same(vars(read_prefill(bundle)), vars(calibrated()))
    same(vars(read_contexts(bundle)), vars(contexts()))
    assert prefill_facts(bundle)["tokens"] == 7
    assert bundle.layout.parts["other"].facts == {"a": 1}
    none = dataclasses.replace(calibrated(), shadowed=(False, False), channels={}, rows={})
    same(vars(read_prefill(rewritten(plain, tmp_path / "none", prefill_parts(none)))), vars(none))
    with Bundle.open(plain) as source:
        assert read_prefill(source) is read_contexts(source) is read_tiny_lm(source) is None
        assert prefill_facts(source) == {}
        assert source.layout.tensors.keys() == bundle.layout.tensors.keys()
        for name in source.layout.tensors:
            same(jax.tree.leaves(bundle.stored(name)), jax.tree.leaves(source.stored(name)))
        assert source.tokenizer_files() == bundle.tokenizer_files()
        assert source.layout.weights == bundle.layout.weights


@pytest.mark.parametrize("name", ["default", "draft", "medium", "small"])
def test_packaged_models_can_be_prefilled_in_integers(name: str) -> None:
    """All of their levels lose less than an engine allows."""
    with Bundle.open(Path(jaxllm.__file__).parent / "assets" / f"{name}.jaxllm") as bundle:
        found, ladder = read_prefill(bundle), read_ladder(bundle)
    assert found is not None
    assert found.levels == ((100,) if ladder is None else ladder.levels)
    assert max(map(found.loss, found.levels)) <= MOST_LOSS


def test_levels_their_adapters_and_the_model_survive_the_file(elastic: Path, tmp_path: Path) -> None:
    with Bundle.open(elastic) as bundle:
        assert read_ladder(bundle) == LADDER
        assert require_level(bundle, 50) == sub_config(TINY, LADDER, 50)
        recovery, order = read_recovery(bundle, 50), read_order(bundle)
        assert recovery is not None
        assert order is not None
        assert recovery.scaling == 2.0
        same(recovery.adapter, {name: each.astype(np.float16) for name, each in ADAPTER.items()})
        assert {each.dtype for each in recovery.adapter.values()} == {np.dtype(np.float16)}
        assert read_recovery(bundle, 100) is None
        same((order.groups, order.neurons), (ORDER.groups, ORDER.neurons))
        bundle.verify()
        # The memory of an adapter is released: pages that are used again are read again.
        before = {name: value.copy() for name, value in recovery.adapter.items()}
        release_recovery(bundle, 50)
        same(recovery.adapter, before)
        release_recovery(bundle, 100)
        params = bundle.load()
    release_recovery(bundle, 50)
    plain = Bundle.open(write_tiny_bundle(tmp_path / "plain.jaxllm"))
    same({name: np.asarray(each) for name, each in params.items()},
         {name: np.asarray(each) for name, each in plain.load().items()})  # fmt: skip
    assert read_ladder(plain) is None
    with pytest.raises(ConfigError, match="has no levels, only the whole model; make an elastic bundle"):
        require_level(plain, 50)


def test_an_adapter_that_half_precision_cannot_hold_stays_as_it_is(tmp_path: Path) -> None:
    large = {name: value + np.float32(1e5) for name, value in ADAPTER.items()}
    path = write_tiny_bundle(
        tmp_path / "large.jaxllm", parts=elastic_parts(LADDER, {50: Recovery(large, 1.0)})
    )
    recovery = read_recovery(Bundle.open(path), 50)
    assert recovery is not None
    same(recovery.adapter, large)


def with_tiny_lm(path: Path, parts: dict[str, Part]) -> Bundle:
    return Bundle.open(write_tiny_bundle(path / "m.jaxllm", parts={**elastic_parts(LADDER), **parts}))


@pytest.mark.parametrize("own", [False, True])
def test_a_tiny_lm_survives_the_file(tmp_path: Path, own: bool) -> None:
    tiny = dataclasses.replace(TINY_LM, tokenizer=tiny_tokenizer() if own else None, row_tokens=48)
    bundle = with_tiny_lm(tmp_path, tiny_lm_parts(tiny))
    same(vars(read_tiny_lm(bundle)), vars(tiny))
    bundle.verify()


# Malformed parts.

ADAPTER = adapter_of(sub_config(TINY, LADDER, 50))
RIGHT = ADAPTER["layers.0.attn.q.right"]
LAYER = calibrated().shadowed.index(True)
CHANNELS = calibrated().channels[LAYER, 0]
PARTS = {
    read_order: elastic_parts(LADDER, order=ORDER),
    read_50: elastic_parts(LADDER, {50: Recovery(ADAPTER, 1.0)}),
    read_ladder: elastic_parts(LADDER),
    read_contexts: contexts_parts(contexts()),
    read_prefill: prefill_parts(calibrated()),
    read_tiny_lm: tiny_lm_parts(TINY_LM) | elastic_parts(LADDER),
}
# The part that each reads.
NAMES = {read_50: "recovery.50", read_tiny_lm: "tiny-lm"}
MISSING = object()
OF_ORDER, OF_ADAPTER = "its order of units is malformed", "its adapter of level 50 is malformed"
# Facts and arrays that are changed, and what is said of them.
MALFORMED: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (read_order, {}, {"groups.0": np.zeros_like(ORDER.groups[0])}, OF_ORDER),
    (read_order, {}, {"groups.1": MISSING}, OF_ORDER),
    (read_50, {}, {"layers.0.attn.q.right": RIGHT.reshape(-1)}, OF_ADAPTER),
    (read_50, {}, {"layers.0.attn.q.right": np.full_like(RIGHT, np.nan)}, OF_ADAPTER),
    (read_50, {}, {"layers.9.attn.q.left": RIGHT, "layers.9.attn.q.right": RIGHT}, OF_ADAPTER),
    (read_50, {"scaling": "2"}, {}, "scaling"),
    (read_50, {"scaling": 10**400}, {}, "scaling"),
    (read_ladder, {"ladder": MISSING}, {}, "its list of levels is malformed"),
    (read_ladder, {"ladder": {"levels": [50, 100], "anchors": [9]}}, {}, "is an anchor"),
    (read_contexts, {"chosen": ["channel", 64]}, {}, "not one of different candidates"),
    (read_contexts, {"chosen": ["zip", 16]}, {}, "no codec 'zip'"),
    (read_contexts, {}, {"errors": -np.ones((2, TINY.layers, 3, 2), np.float32)}, "errors are not all in"),
    (read_contexts, {}, {"more": np.ones(1, np.float32)}, "it holds more, which nothing reads"),
    (read_prefill, {"levels": [50, 100]}, {}, "steps must be"),
    (read_prefill, {"shadowed": [True]}, {}, "whether they have a shadow"),
    (read_prefill, {"losses": {"100": [float("nan"), 0]}}, {}, "no pairs"),
    (read_prefill, {}, {f"channels.{LAYER}.0": CHANNELS + 64}, "not different ones of 64"),
    (read_prefill, {}, {f"channels.{LAYER}.0": MISSING}, "channels of layer"),
    (read_prefill, {}, {f"rows.{LAYER}.0.9": np.ones((2, 2), np.float16)}, "which nothing reads"),
    (read_tiny_lm, {"config": {"encoder": 1}}, {}, "malformed"),
    (read_tiny_lm, {"row_tokens": MISSING}, {}, "row_tokens"),
    (read_tiny_lm, {"own_tokenizer": True}, {}, "disagree on whether it has a tokenizer"),
    (read_tiny_lm, {"own_tokenizer": True}, {"tokenizer": np.zeros(3, np.uint8)}, "tokenizer is malformed"),
    (read_tiny_lm, {}, {"score.keep": np.zeros((1, 9), np.float32)}, "must be floats of shape"),
    (read_tiny_lm, {}, {"more": np.zeros(1, np.float32)}, "disagree on more"),
]


@pytest.mark.parametrize(("read", "facts", "arrays", "message"), MALFORMED)
def test_malformed_parts_are_refused(
    plain: Path, tmp_path: Path, read: Any, facts: Any, arrays: Any, message: str
) -> None:
    name = NAMES.get(read, next(iter(PARTS[read])))
    part = PARTS[read][name]
    changed = [{**part.facts, **facts}, {**part.arrays, **arrays}]
    kept = [{key: each for key, each in own.items() if each is not MISSING} for own in changed]
    with pytest.raises(BundleError, match=message):
        read(rewritten(plain, tmp_path / "m", {**PARTS[read], name: Part(*kept)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": (100, 50)}, "levels must be ascending"),
        ({"prompt_ratios": (0, 0.5, 1)}, r"prompt ratios must be ascending numbers in \(0, 1\]"),
        ({"mark_ids": (1,) * 18}, "18 different tokens"),
        ({"row_tokens": 65}, "rows must have 3 to 64 tokens"),
        ({"params": {**TINY_LM.params, "embed.types": np.zeros((2, 9), np.float32)}}, "embed.types must be"),
        ({"params": {**TINY_LM.params, "score.keep": np.zeros((1, 16), np.int8)}}, "got int8"),
    ],
)
def test_a_tiny_lm_whose_fields_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY_LM, **change)


def test_a_tiny_lm_of_another_model_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"lacks \[50\]"):
        read_tiny_lm(rewritten(plain, tmp_path / "m", tiny_lm_parts(TINY_LM)))
    encoder = dataclasses.replace(TINY_LM.cfg.encoder, vocab_size=VOCAB_SIZE - 1)
    cfg = dataclasses.replace(TINY_LM.cfg, encoder=encoder)
    small = dataclasses.replace(TINY_LM, cfg=cfg, params=random_tlm(cfg))
    with pytest.raises(BundleError, match="it is of another model"):
        read_tiny_lm(with_tiny_lm(tmp_path, tiny_lm_parts(small)))


def test_arrays_of_a_part_are_plain_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x of part more must be one of float32"):
        write_tiny_bundle(tmp_path / "bad.jaxllm", parts={"more": Part({}, {"x": np.zeros(3, np.int64)})})
    assert not (tmp_path / "bad.jaxllm").exists()


def test_a_damaged_part_is_noticed_when_it_is_read(elastic: Path, tmp_path: Path) -> None:
    with Bundle.open(elastic) as bundle:
        segment = bundle.layout.segments["part.recovery.50"]
    raw = bytearray(elastic.read_bytes())
    raw[segment.offset + segment.size_bytes // 2] ^= 1
    path = tmp_path / "damaged.jaxllm"
    path.write_bytes(raw)
    with Bundle.open(path) as bundle:
        bundle.load()
        with pytest.raises(BundleError, match=r"segment 'part\.recovery\.50' is corrupt"):
            read_recovery(bundle, 50)
