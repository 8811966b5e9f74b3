"""Answers at several levels of one model, over one copy of its weights."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import Recovery, elastic_parts
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.config import FULL_LEVEL
from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.elastic.units import reorder
from jaxllm.errors import ConfigError, ContextGone, JaxllmError
from jaxllm.kernels import native
from jaxllm.models.decoder import forward_documents, logits
from jaxllm.models.layer_stack import STACK, StackedLayers
from jaxllm.models.lora import LoraConfig, init_adapter, merge
from jaxllm.serving.buckets.model import PrefillBucket, SampleBucket
from jaxllm.serving.elastic import levels
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.weights.model_level import ModelLevel
from tests.elastic.models import random_order
from tests.kernels.switching import fall_back, needs_native
from tests.models.test_lora import random_adapter as adapter_of
from tests.tiny import TINY, random_params, tiny_params, write_tiny_bundle

CFG = dataclasses.replace(TINY, layers=3, heads=8, kv_heads=4, attention_windows=())
LADDER = Ladder(levels=(40, 70, 100), anchors=(1,))
OPTIONS = EngineOptions(
    context_tokens=64, cache_tokens=(64,), chunk_tokens=(16,), levels=(40, 70), buckets_bytes=0
)
PROMPT = [1, 50, 7, 99, 23]


def random_adapter(cfg, seed=1):
    adapter = init_adapter(cfg, LoraConfig(rank=2, targets=("attn.q", "ffn.down")), jax.random.key(seed))
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=part.shape).astype(np.float32) * 0.3 for name, part in adapter.items()}


RECOVERY = random_adapter(sub_config(CFG, LADDER, 40))


def written(folder, weights="f32", name="tiny", parts=None, params=None):
    """A bundle with levels, of which 40 has a recovery."""
    parts = elastic_parts(LADDER, {40: Recovery(RECOVERY, 0.5)}) if parts is None else parts
    return write_tiny_bundle(folder / f"{name}.jaxllm", weights, cfg=CFG, params=params, parts=parts)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return written(tmp_path_factory.mktemp("levels"))


@pytest.fixture(scope="module")
def engine(path):
    return Engine.open(path, options=OPTIONS)


@functools.partial(jax.jit, static_argnums=2)
def all_logits(params, tokens, cfg):
    return logits(params, forward_documents(params, tokens, cfg=cfg), cfg=cfg)


def greedy(level, tokens, count):
    """The level's answer without caches, engines or views."""
    cfg = sub_config(CFG, LADDER, level)
    params = sub_model({name: jax.numpy.asarray(value) for name, value in tiny_params(CFG).items()}, cfg)
    if level == 40:
        params = merge(params, RECOVERY, 0.5)
    tokens = list(tokens)
    for _ in range(count):
        row = np.zeros((1, 64), np.int32)
        row[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(all_logits(params, row, cfg)[0, len(tokens) - 1])))
    return tokens[-count:]


def ask(engine, level, session=None, prompt=PROMPT):
    config = GenerationConfig(max_tokens=12, ignore_eos=True)
    return engine.stream(prompt, config, level=level, session=session).result()


def scores(engine, level):
    """Logits after the prompt."""
    runner = engine.runner_at(level)
    return np.asarray(prefill_prompt(runner, runner.start(9), PROMPT, 0)[0])


def test_a_level_answers_as_its_units_alone(engine):
    answers = [ask(engine, level).tokens for level in (40, 70, 100)]
    assert answers == [greedy(level, PROMPT, 12) for level in (40, 70, 100)]
    assert len(set(map(tuple, answers))) == 3


def test_nothing_is_compiled_when_levels_change(engine, compiles):
    before, half = set(engine.runner.buckets.bucket_ms), engine.at(40)
    config = GenerationConfig(max_tokens=12, ignore_eos=True)
    with compiles() as count:
        for level in (100, 40, 70, 40, 100):
            ask(engine, level)
        # An engine at a level is that level.
        assert half.generate(PROMPT, config).tokens == ask(engine, 40).tokens
        assert ask(half, 100).tokens == engine.generate(PROMPT, config).tokens
        # A session that changes its level is fed anew.
        session = Session()
        longer = [*PROMPT, *ask(engine, 100, session).tokens, 9]
        assert ask(engine, 100, session, longer).reused_tokens == len(longer) - 2
        other = ask(engine, 40, session, longer)
        assert ask(engine, 40, session, longer).reused_tokens > 0
    assert count() == 0
    assert (other.reused_tokens, other.tokens) == (0, greedy(40, longer, 12))
    assert set(engine.runner.buckets.bucket_ms) == before
    assert {bucket.level for bucket in before if isinstance(bucket, PrefillBucket)} == {40, 70, 100}
    assert {bucket.level for bucket in before if isinstance(bucket, SampleBucket)} == {100}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="views of memory are a CPU's")
@pytest.mark.parametrize(
    "weights", ["f32", "int8", *(pytest.param(each, marks=pytest.mark.campaign) for each in ("bf16", "int4"))]
)
def test_levels_hold_no_weights_of_their_own(tmp_path, weights):
    if weights.startswith("int") and not native.kernels().native:
        pytest.skip("what is in blocks is read by native kernels")
    path = written(tmp_path, weights, parts=elastic_parts(LADDER))
    engine = Engine.open(path, options=OPTIONS, warm_up=False)

    def places(level):
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.runner_at(level).params)]

    if weights.startswith("int"):
        # But for the few numbers that tell how many there are.
        assert sum(map(len, (places(40), places(70)))) == 2 * len(places(100))
        assert len({*places(40), *places(70), *places(100)}) == len(places(100)) + 2
    else:
        assert places(40) == places(70) == places(100)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.campaign)])
def test_one_set_of_buckets_serves_all_levels_of_weights_in_blocks(tmp_path, monkeypatch, weights, compiles):
    """To the bit as buckets that were compiled for each level's own units."""
    path = written(tmp_path, weights)
    engine = Engine.open(path, options=OPTIONS)
    assert {bucket.level for bucket in engine.runner.buckets.bucket_ms} == {100}
    with compiles() as count:
        answers = [ask(engine, level).tokens for level in (40, 70, 100)]
    assert count() == 0
    assert len(set(map(tuple, answers))) == 3
    monkeypatch.setattr(levels, "can_be_counted", lambda *_: False)
    apart = Engine.open(path, options=OPTIONS)
    assert {bucket.level for bucket in apart.runner.buckets.bucket_ms} == {40, 70, 100}
    assert answers == [ask(apart, level).tokens for level in (40, 70, 100)]
    for level in (40, 70, 100):
        np.testing.assert_array_equal(scores(engine, level), scores(apart, level))


@pytest.mark.slow
@needs_native
def test_an_adapter_goes_beside_recoveries_of_other_matrices_in_one_set_of_buckets(
    tmp_path, monkeypatch, compiles
):
    """As in buckets of each level's own, to the rounding of sums over ranks in another order."""
    path = written(tmp_path, "int8")
    lora = LoraConfig(rank=3, targets=("attn.q", "ffn.up"))
    adapter = {
        key: np.asarray(each) + 0.05 for key, each in init_adapter(CFG, lora, jax.random.key(6)).items()
    }
    write_adapter(tmp_path / "adapter", CFG, lora, adapter, base="tiny")
    options = dataclasses.replace(OPTIONS, adapter_rank=4, adapter_targets=lora.targets)
    together = Engine.open(path, options=options)
    monkeypatch.setattr(levels, "can_be_counted", lambda *_: False)
    apart = Engine.open(path, options=options)
    assert (together.model._levels.counted, apart.model._levels.counted) == (True, False)
    plain = {level: scores(together, level) for level in (40, 70, 100)}
    for folder in (tmp_path / "adapter", None):
        with compiles() as count:
            for engine in (together, apart):
                engine.set_adapter(folder)
        assert count() == 0
        for level in (40, 70, 100):
            found, expected = scores(together, level), scores(apart, level)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
            assert (np.abs(found - plain[level]).max() > 1e-3) == (folder is not None)


@pytest.mark.slow
def test_an_adapter_follows_the_order_of_units(tmp_path):
    lora = LoraConfig(rank=2, targets=("attn.q", "attn.o", "ffn.up", "ffn.down"))
    adapter = init_adapter(CFG, lora, jax.random.key(4))
    adapter = {name: np.asarray(part) + 0.05 for name, part in adapter.items()}
    write_adapter(tmp_path / "adapter", CFG, lora, adapter, base="tiny")
    order = random_order(CFG)
    moved = dict(reorder(CFG, tiny_params(CFG).items(), order))
    ordered = elastic_parts(LADDER, order=order)
    paths = [written(tmp_path, parts={}), written(tmp_path, name="moved", params=moved, parts=ordered)]
    options = dataclasses.replace(OPTIONS, levels=())
    plain, ordered = (Engine.open(path, options=options, adapter=tmp_path / "adapter") for path in paths)
    assert ask(plain, 100).tokens == ask(ordered, 100).tokens
    without = Engine.open(paths[0], options=options)
    assert ask(without, 100).tokens != ask(plain, 100).tokens


def test_levels_that_are_not_there(path, engine, tmp_path):
    with pytest.raises(ConfigError, match="level 50 is not served; the engine was opened for 40, 70, 100"):
        ask(engine, 50)
    with pytest.raises(ConfigError, match="there is no level 55; there are 40, 70, 100"):
        Engine.open(path, options=dataclasses.replace(OPTIONS, levels=(55,)), warm_up=False)
    plain = written(tmp_path, name="plain", parts={})
    with pytest.raises(ConfigError, match="has no levels"):
        Engine.open(plain, options=OPTIONS, warm_up=False)
    # A recovery adapter is of another base.
    parts = elastic_parts(LADDER, {40: Recovery(random_adapter(CFG), 0.5)})
    other = written(tmp_path, parts=parts)
    with pytest.raises(JaxllmError, match=r"is malformed \(its change to"):
        Engine.open(other, options=OPTIONS, warm_up=False)


WINDOWED = dataclasses.replace(TINY, layers=3, attention_windows=(0, 8, 0))


def test_a_level_may_share_the_whole_models_buckets():
    params, options = random_params(WINDOWED, seed=0), EngineOptions().resolve(WINDOWED)
    whole = ModelLevel(WINDOWED, params, options)
    # Layers that are alike share theirs.
    assert (whole.alike, whole.layer_kinds) == ((0, 1, 0), [0, 1])
    half = ModelLevel(WINDOWED, params, options, level=50, whole=whole)
    assert (half.bucket_level, half.weights_version) == (FULL_LEVEL, (50, 0))
    fewer = {name: each for name, each in params.items() if "layers.2" not in name}
    with pytest.raises(ConfigError, match="of another form"):
        ModelLevel(WINDOWED, fewer, options, level=50, whole=whole)
    # Other parameters of the same form make another version.
    other = random_params(WINDOWED, seed=1)
    whole.put(whole.prepared(other))
    with pytest.raises(ConfigError, match="of another form"):
        whole.prepared({**other, "embed.tokens": np.zeros((3, 3), np.float32)})
    assert (whole.params is other, whole.weights_version) == (True, (FULL_LEVEL, 1))


# Without native kernels a quantized model's equal layers are stacked when it is loaded; levels are views.


@pytest.mark.parametrize(("weights", "level"), [("int8", 50), ("int8", 100), ("f32", 100), ("bf16", 100)])
def test_an_engine_answers_from_stacks(tmp_path, weights, level, monkeypatch):
    """Floats stay in the mapped file."""
    fall_back(monkeypatch)
    path = written(tmp_path, weights, parts=elastic_parts(Ladder(levels=(50, 100), anchors=(1,))))

    def answer():
        options = dataclasses.replace(OPTIONS, levels=(50,))
        with contextlib.closing(Engine.open(path, options=options, level=level)) as engine:
            return engine.runner.params, ask(engine, level).tokens

    params, tokens = answer()
    with Bundle.open(path) as bundle:
        flat, stacked = bundle.load(), bundle.load(stacked=True)
        assert list(flat) == list(stacked)
        for one, other in zip(jax.tree.leaves(flat), jax.tree.leaves(stacked), strict=True):
            np.testing.assert_array_equal(one, np.asarray(other))
    if weights != "int8":
        assert STACK not in params
        return
    assert isinstance(params[STACK], StackedLayers)
    monkeypatch.setattr("jaxllm.serving.opening.loading.stacks_layers", lambda *_: False)
    flat, expected = answer()
    assert STACK not in flat
    assert tokens == expected


# Adapters on a running engine: put on, changed and taken off, and nothing is compiled.


TINY_OPTIONS = dataclasses.replace(OPTIONS, levels=())
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (rank, targets) in enumerate([(4, LoraConfig.targets), (2, ("attn.q", "ffn.down"))]):
        lora = LoraConfig(rank=rank, alpha=16, targets=targets)
        write_adapter(folder / str(seed), TINY, lora, adapter_of(TINY, lora, seed))
    return folder / "0", folder / "1"


@pytest.fixture(scope="module", params=["f32", "int8"])
def adaptable(request, tmp_path_factory):
    bundle = write_tiny_bundle(tmp_path_factory.mktemp("adapted") / "tiny.jaxllm", request.param)
    return Engine.open(bundle, options=dataclasses.replace(TINY_OPTIONS, adapter_rank=4))


def answer(engine, session=None):
    return engine.stream(PROMPT, CONFIG, session=session or Session()).result().tokens


def test_adapters_are_swapped_without_compiling(adaptable, adapters, compiles):
    plain = answer(adaptable)
    with compiles() as count:
        adaptable.set_adapter(adapters[0])
        first = answer(adaptable)
        adaptable.set_adapter(adapters[1])
        second = answer(adaptable)
        adaptable.set_adapter(None)
        assert answer(adaptable) == plain
        assert count() == 0
    assert len({tuple(plain), tuple(first), tuple(second)}) == 3


@pytest.mark.slow
def test_an_engine_opens_with_an_adapter_of_its_own_size_or_none(adaptable, adapters):
    path = adaptable.model.bundle.path
    assert answer(adaptable) == answer(Engine.open(path, options=TINY_OPTIONS))
    opened = Engine.open(path, options=TINY_OPTIONS, adapter=adapters[1])
    assert (opened.options.adapter_rank, opened.options.adapter_targets) == (2, ("attn.q", "ffn.down"))
    adaptable.set_adapter(adapters[1])
    assert answer(opened) == answer(adaptable)
    adaptable.set_adapter(None)
    with pytest.raises(ConfigError, match="adapter_targets"):
        opened.set_adapter(adapters[0])


def test_a_session_is_fed_anew_under_another_adapter(adaptable, adapters):
    session = Session()
    answer(adaptable, session)
    again = adaptable.stream(PROMPT, CONFIG, session=session).result()
    assert again.reused_tokens > 0
    adaptable.set_adapter(adapters[0])
    adapted = adaptable.stream(PROMPT, CONFIG, session=session).result()
    assert adapted.reused_tokens == 0
    assert adapted.tokens == answer(adaptable)
    # In the middle of an answer there is nothing right to go on with.
    running = adaptable.stream(PROMPT, dataclasses.replace(CONFIG, max_tokens=60), session=Session())
    next(iter(running))
    adaptable.set_adapter(None)
    with pytest.raises(ContextGone, match="adapter was changed"):
        running.result()


def test_an_engine_without_room_for_adapters_says_so(tiny_bundle, adapters):
    plain = Engine.open(tiny_bundle, options=TINY_OPTIONS, warm_up=False)
    with pytest.raises(ConfigError, match="adapter_rank"):
        plain.set_adapter(adapters[0])
    with pytest.raises(ConfigError, match="need an adapter_rank"):
        dataclasses.replace(TINY_OPTIONS, adapter_targets=("attn.q",))
