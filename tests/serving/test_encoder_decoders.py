"""Encoder-decoders: answers of a source, in memory and streamed, and what they are refused."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle, expert_widths, lay_experts_apart
from jaxllm.bundle.levels import elastic_parts, read_ladder, read_order
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.elastic.ladder import Ladder, layer_parameters, sub_config
from jaxllm.elastic.units import order_of_scores, reorder
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextOverflow
from jaxllm.kernels import native
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder, encoder_decoder
from jaxllm.models.architectures import architecture
from jaxllm.models.features import feature_refusal
from jaxllm.models.lora import LoraConfig, init_adapter
from jaxllm.models.parameters import ENCODER, sparse_layers
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig, Session, Sliding
from jaxllm.serving.experts.store import ExpertStore
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.host import direct_io
from jaxllm.serving.opening.weight_source import budget_with_experts
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.weights import pieces
from tests import tiny, tiny_encdec
from tests.kernels.switching import fall_back, needs_native
from tests.serving.memory import budget
from tests.serving.speculation.test_speculative import sharp
from tests.tiny_variants import ENCODER_DECODERS

SMALL = EngineOptions(chunk_tokens=(16,), decode_block=4, context_tokens=48)
LONG = GenerationConfig(max_tokens=12, ignore_eos=True, sampling=Sampling(temperature=0))


@pytest.fixture(scope="module", params=["f32", pytest.param("int8", marks=pytest.mark.campaign)])
def path(request, tmp_path_factory):
    """Of eight bits are the models that are streamed or drafted."""
    return tiny_encdec.write_bundle(tmp_path_factory.mktemp("model") / "tiny.jaxllm", request.param)


@pytest.fixture(scope="module")
def engine(path):
    engine = Engine.open(path, options=SMALL)
    yield engine
    engine.close()


def greedy(path, source, start, count):
    """Greedy tokens by the model's functions alone, each after a pass over all tokens before it."""
    with Bundle.open(path) as bundle:
        params, cfg = bundle.load(), bundle.cfg
        encoder = encoder_decoder.encoder_params(params)
        row = np.array([source], np.int32)
        found = list(start)
        for _ in range(count):
            cache = new_cache(cfg, batch=1, tokens=32, dtype=jnp.float32)
            cache = encoder_decoder.read_source(params, encoder, row, np.int32(len(source)), cache, cfg=cfg)
            hidden, _ = decoder.forward(params, np.array([found], np.int32), cache, cfg=cfg)
            found.append(int(jnp.argmax(decoder.logits(params, hidden, cfg=cfg)[0, -1])))
    return found[len(start) :]


def test_answers_are_those_of_the_model(engine, path):
    before = dict(engine.runner.buckets.bucket_ms)
    answer = engine.generate("hello the hello", LONG)
    source = engine.tokenizer.encode("hello the hello")
    assert answer.prompt_tokens == len(source)
    if engine.model.bundle.layout.weights == "f32":
        assert answer.tokens == greedy(path, source, [tiny.BEGIN_ID], 12)
    assert len(answer.tokens) == 12
    # Another source gives another answer: what was encoded is not of the one before.
    other = engine.generate("zzzz 12345", LONG).tokens
    assert other != answer.tokens == engine.generate("hello the hello", LONG).tokens
    # Answers that run together do not mix.
    runs = [engine.stream(text, LONG) for text in ("hello the hello", "zzzz 12345")]
    for _ in zip(*runs, strict=False):
        pass
    assert [run.result().tokens for run in runs] == [answer.tokens, other]
    # Text is streamed, and sampling draws.
    drawn = dataclasses.replace(LONG, sampling=Sampling(temperature=1.0, seed=3))
    streamed = engine.stream("hello", drawn)
    assert "".join(streamed) == streamed.text
    assert engine.generate("hello", drawn).tokens == streamed.tokens
    for text in ("a", "hello " * 6, "b" * 40):
        engine.generate(text, LONG)
    assert engine.runner.buckets.bucket_ms == before, "something was compiled after the start"


def test_adapters_change_both_sides(path, tmp_path):
    """What they change is what merging them would: `test_rooms.py`."""
    with Bundle.open(path) as bundle:
        cfg = bundle.cfg
    lora = LoraConfig(rank=2, alpha=4)
    draw, adapter = np.random.default_rng(0), init_adapter(cfg, lora, jax.random.key(0))
    adapter = {name: draw.normal(size=each.shape).astype(np.float32) * 0.3 for name, each in adapter.items()}
    write_adapter(tmp_path / "lora", cfg, lora, adapter)
    engine = Engine.open(path, options=dataclasses.replace(SMALL, adapter_rank=4))
    plain = engine.generate("hello the hello", LONG).tokens
    # Of one side, and of both; then none again, and nothing was compiled.
    before, answers = dict(engine.runner.buckets.bucket_ms), [plain]
    for sides in ("encoder.", "layers.", ("encoder.", "layers.")):
        own = {name: each for name, each in adapter.items() if name.startswith(sides)}
        engine.model.put_adapter(own, lora.scaling)
        answers.append(engine.generate("hello the hello", LONG).tokens)
    assert answers[0] not in answers[1:]
    assert answers[1] != answers[2]
    engine.set_adapter(tmp_path / "lora")
    assert engine.generate("hello the hello", LONG).tokens == answers[3]
    engine.set_adapter(None)
    assert engine.generate("hello the hello", LONG).tokens == plain
    assert engine.runner.buckets.bucket_ms == before
    engine.close()


def test_a_conversation_is_one_source(engine):
    asked = [{"role": "system", "content": "hello"}, {"role": "user", "content": "the"}]
    assert engine.chat(asked, LONG).result().tokens == engine.generate("hello\nthe", LONG).tokens
    for roles in (["user", "assistant", "user"], ["assistant"], []):
        with pytest.raises(ConfigError, match=r"answers one message of a user, its source.*no later turns"):
            engine.chat([{"role": each, "content": "hello"} for each in roles])


def test_what_is_refused(engine, path, tmp_path):
    with pytest.raises(ContextOverflow, match=r"source has 60 tokens, and the encoder reads at most 48"):
        engine.generate([5] * 60, LONG)
    with pytest.raises(ConfigError, match="reads a source"):
        engine.generate([], LONG)
    with pytest.raises(ConfigError, match="outside the model's vocabulary"):
        engine.generate([tiny.VOCAB_SIZE], LONG)
    with pytest.raises(ConfigError, match="conversations that go on: not for"):
        engine.stream("hello", LONG, session=Session())
    with pytest.raises(ConfigError, match="answers that outgrow the context: not for"):
        engine.stream("hello", LONG, sliding=Sliding(sink_tokens=1))
    with pytest.raises(ConfigError, match="scoring or embedding text: not for"):
        Scorer(engine.runner)
    with pytest.raises(ConfigError, match="elastic"):
        Engine.open(path, options=SMALL, level=50)
    files = dataclasses.replace(tiny_encdec.tokenizer(), start_ids=())
    unstarted = tiny.write_tiny_bundle(tmp_path / "m.jaxllm", cfg=tiny_encdec.TINY_T5, tokenizer=files)
    without = Engine.open(unstarted, options=SMALL, warm_up=False)
    with pytest.raises(ConfigError, match="set decoder_start_token_id"):
        without.stream("hello", LONG)
    without.close()


# Levels: units of both sides in order, and sub-models as counts of them.


TEXT = "hello the hello"
# The encoder shrinks by other units than the decoder.
LADDER = Ladder(levels=(70, 100), encoder=Ladder(levels=(70, 100), anchors=(0,)))
_FOLDER = {**ENCODER_DECODERS["bart"][1], "model_type": "bart", "vocab_size": tiny.VOCAB_SIZE}
CFGS = {"t5": tiny_encdec.TINY_T5, "bart": architecture("bart").config_from_hf(_FOLDER)}


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
    mixed = dataclasses.replace(order, groups=(order.groups[0], order.groups[0][::-1]))
    with pytest.raises(ConfigError, match="with relative positions the kv groups of all layers"):
        dict(reorder(cfg, params.items(), mixed))
    some = scores(cfg, 0)
    del some["cross.0"]
    with pytest.raises(ConfigError, match=r"scores of 'cross\.0' are missing"):
        order_of_scores(cfg, some)
    with pytest.raises(ConfigError, match="the encoder's levels must be those of the decoder"):
        Ladder(levels=(70, 100), encoder=Ladder(levels=(30, 100)))


# Where only a part of the model is in memory, answers are as if all of it were, with drafts and without.


TREES = TreeShape(nodes=(4, 8), room=8, tips=2, branches=3)
TOKENS = 8
_LAYERS = {"layers": 4, "attention_windows": (0,) * 4}
T5 = dataclasses.replace(
    tiny_encdec.TINY_T5, **_LAYERS, encoder=dataclasses.replace(tiny_encdec.ENCODER, **_LAYERS)
)
_BART = {
    "relative_buckets": 0, "relative_distance": 0, "learned_positions": True, "embed_norm": True,
    "norm": "layer", "norm_after": True, "final_norm": False, "qkv_bias": True, "o_bias": True,
    "ffn_bias": True, "activation": "gelu", "model_type": "bart", "window_tokens": 64,
    "attention_scale": 0.25,
}  # fmt: skip
_SIDE = dataclasses.replace(tiny_encdec.ENCODER, **_LAYERS, **_BART)
BART = dataclasses.replace(_SIDE, encoder=_SIDE, head_bias=True)
MARIAN = dataclasses.replace(
    BART,
    learned_positions=False, sinusoidal_positions=True, embed_norm=False, model_type="marian",
    encoder=dataclasses.replace(_SIDE, learned_positions=False, sinusoidal_positions=True, embed_norm=False),
)  # fmt: skip


def written(folder, weights, cfg):
    params = sharp(cfg)
    if cfg.head_bias:
        params["head_bias"] = np.linspace(-2, 2, cfg.vocab_size).astype(np.float32)
    return write(folder / f"{weights}.jaxllm", cfg, params, weights)


def source(place):
    draw = np.random.default_rng(place)
    return draw.integers(3, 90, draw.integers(3, 41)).tolist()


def config(place):
    """Every fourth answer is drawn."""
    drawn = Sampling(temperature=0.9, top_p=0.95, seed=place, repetition_penalty=1.1)
    sampling = Sampling(temperature=0) if place % 4 else drawn
    return GenerationConfig(max_tokens=TOKENS, ignore_eos=True, sampling=sampling)


def opened(path, whole, share=0.6, **more):
    memory = {"memory_bytes": budget(whole, share, more.get("speculation"))}
    return Engine.open(path, options=dataclasses.replace(SMALL, **memory), **more)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return written(tmp_path_factory.mktemp("t5"), "int8-nested" if native.kernels().native else "int8", T5)


@pytest.fixture(scope="module")
def whole(t5):
    engine = Engine.open(t5, options=SMALL)
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "weights", "native_kernels"),
    [
        pytest.param(T5, "int8-nested", True, marks=needs_native),
        (T5, "int8", False),
        (BART, "int8", True),
        *(
            pytest.param(*each, True, marks=pytest.mark.campaign)
            for each in ((MARIAN, "int8"), (T5, "f32"), (T5, "int4"), (BART, "bf16"))
        ),
    ],
)
def test_every_family_streams(tmp_path, monkeypatch, cfg, weights, native_kernels):
    if not native_kernels:
        fall_back(monkeypatch)
    path = written(tmp_path, weights, cfg)
    whole = Engine.open(path, options=SMALL, warm_up=False)
    streamed = opened(path, whole, warm_up=False)
    plan = streamed.model.streamed.plan
    assert plan.slots == 2
    # What each token needs is kept before what each prompt needs once.
    assert cfg is not T5 or min(plan.resident) >= cfg.encoder.layers
    assert plan.planned_bytes <= plan.budget_bytes
    for engine in (whole, streamed):
        engine.runner.fill(engine.runner.buckets_for())
    built = dict(streamed.runner.buckets.bucket_ms)
    for place in range(30):
        expected = whole.generate(source(place), config(place)).tokens
        assert streamed.generate(source(place), config(place)).tokens == expected, place
    assert streamed.runner.buckets.bucket_ms == built
    whole.close()
    streamed.close()


def test_the_encoder_is_read_once_per_source(t5, whole, monkeypatch):
    # Layers so small would be read whole: a seek takes longer.
    monkeypatch.setattr(pieces, "_SHORT_GAP_BYTES", 0)
    streamed = opened(t5, whole, 0.4)
    layout = streamed.model.bundle.layout
    encoder = [layout.segments[f"encoder.layers.{each}"] for each in range(T5.encoder.layers)]
    crossing = [
        extent
        for name, each in layout.tensors.items()
        if ".cross.k" in name or ".cross.v" in name
        for extent in each.extents
    ]
    counted, read_into = [], direct_io.PieceReader.read_into

    def counting(self, memory, place, offset, size):
        counted.append((offset, offset + size))
        read_into(self, memory, place, offset, size)

    def reads(begin, end):
        return sum(max(0, min(end, last) - max(begin, first)) for first, last in counted) / (end - begin)

    streamed.generate(source(0), config(1))
    monkeypatch.setattr(direct_io.PieceReader, "read_into", counting)
    answers = [streamed.generate(source(place), config(1)).tokens for place in range(3)]
    assert all(len(each) == TOKENS for each in answers)
    for each in encoder:
        assert reads(each.offset, each.offset + each.size_bytes) == pytest.approx(3), each.name
    # Of layers that are not resident each once, and for no token again.
    assert {round(reads(each.offset, each.offset + each.size_bytes), 2) for each in crossing} <= {0, 3}
    streamed.close()


@pytest.mark.slow
@needs_native
def test_drafts_by_high_planes_change_no_answer(t5, whole):
    how = SpeculationOptions(drafter="nested", trees=TREES, pausing=False, fallback="fixed", alpha=1e-6)
    # The high planes and the head stay in memory.
    streamed = opened(t5, whole, 0.85, speculation=how)
    assert streamed.model.streamed.plan.slots >= 2
    before = dict(streamed.runner.buckets.bucket_ms)
    for place in range(20):
        expected = whole.generate(source(place), config(place)).tokens
        assert streamed.generate(source(place), config(place)).tokens == expected, place
    # High planes know the source, and so what the target says of it.
    assert streamed.speculation.counts.acceptance_length > 1.25
    # Answers to two sources that take turns.
    expected = [whole.generate(source(each), config(each)).tokens for each in (1, 2)]
    first, second = streamed.stream(source(1), config(1)), streamed.stream(source(2), config(2))
    for _ in zip(first, second, strict=False):
        pass
    assert [first.result().tokens, second.result().tokens] == expected
    assert streamed.runner.buckets.bucket_ms == before
    streamed.close()


def test_a_source_whose_reading_fails_leaves_nothing_behind(t5, whole, monkeypatch):
    streamed = opened(t5, whole)
    expected = whole.generate(source(1), config(1)).tokens
    read_into, calls = direct_io.PieceReader.read_into, []

    def failing(self, *rest):
        calls.append(rest)
        if len(calls) == 3:
            raise CheckpointError("the disk is gone")
        read_into(self, *rest)

    monkeypatch.setattr(direct_io.PieceReader, "read_into", failing)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        streamed.generate(source(1), config(1))
    assert streamed.generate(source(1), config(1)).tokens == expected
    streamed.close()
    with pytest.raises(BudgetExceeded, match="this model needs at least"):
        opened(t5, whole, 0.05)


# A Switch model whose experts are on storage: an encoder's expert is loaded at most once per prompt.


_SPARSE = {
    "model_type": "switch_transformers", "layers": 4, "attention_windows": (0,) * 4, "experts": 8,
    "experts_per_token": 1, "normalize_expert_weights": False, "expert_capacity": 5,
    "expert_ffn_size": 48, "sparse_layers": (False, True) * 2,
}  # fmt: skip
_SWITCH = dataclasses.replace(tiny_encdec.ENCODER, **_SPARSE)
SWITCH = dataclasses.replace(_SWITCH, encoder=_SWITCH, window_tokens=64)


@pytest.fixture(scope="module", params=["int8", pytest.param("f32", marks=pytest.mark.campaign)])
def together(request, tmp_path_factory):
    return written(tmp_path_factory.mktemp("switch"), request.param, SWITCH)


@pytest.fixture(scope="module")
def apart(together):
    path = together.with_name("apart.jaxllm")
    with Bundle.open(together) as bundle:
        lay_experts_apart(path, bundle, expert_widths(bundle))
    return path


@pytest.fixture(scope="module")
def switch(together):
    engine = Engine.open(together, options=SMALL)
    yield engine
    engine.close()


def opened_apart(path, experts, **more):
    """With room for so many experts."""
    trees = more["speculation"].trees if "speculation" in more else None
    options = dataclasses.replace(SMALL, trees=trees)
    with Bundle.open(path) as bundle:
        quantized = bundle.layout.weights == "int8"
        resolved = options.resolve(bundle.cfg, quantized=quantized)
        room = experts * ExpertStore(bundle).largest_bytes
        memory = budget_with_experts(bundle, resolved, room)
    return Engine.open(path, options=dataclasses.replace(options, memory_bytes=memory), **more)


@pytest.mark.slow
def test_experts_on_storage_change_no_answer_and_are_loaded_once(apart, switch):
    streamed = opened_apart(apart, 6)
    experts = streamed.model.streamed
    assert experts.store.of_encoder == 2
    before = dict(streamed.runner.buckets.bucket_ms)
    for place in range(30):
        expected = switch.generate(source(place), config(place)).tokens
        loads = collections.Counter(experts.counts.loads)
        assert streamed.generate(source(place), config(place)).tokens == expected, place
        loads = experts.counts.loads - loads
        assert max((count for key, count in loads.items() if key[0] < 2), default=0) <= 1
    assert streamed.runner.buckets.bucket_ms == before
    facts = experts.facts()
    assert [len(facts[name]) for name in ("layer_hit_rates", "encoder_layer_hit_rates")] == [2, 2]
    # The decoder's experts stay for the next token, those of the encoder for nobody.
    assert min(facts["layer_hit_rates"]) > max(facts["encoder_layer_hit_rates"])
    streamed.close()
    # Without a budget all of them are in memory.
    engine = Engine.open(apart, options=SMALL)
    assert engine.model.streamed is None
    for place in range(4):
        expected = switch.generate(source(place), config(place)).tokens
        assert engine.generate(source(place), config(place)).tokens == expected
    engine.close()


def test_both_sides_have_the_same_experts(tmp_path):
    assert sparse_layers(SWITCH) == ["encoder.layers.1.", "encoder.layers.3.", "layers.1.", "layers.3."]
    other = dataclasses.replace(SWITCH, encoder=dataclasses.replace(_SWITCH, experts=4))
    assert "both sides have as many" in feature_refusal(other, "separate experts")
    with pytest.raises(ConfigError, match="both sides have as many"):
        tiny.write_tiny_bundle(tmp_path / "odd.jaxllm", "int8", cfg=other, expert_bits=np.full((4, 8), 8))
