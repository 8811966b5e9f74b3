"""Engines of encoder-decoders: answers of a source, what they are refused, and that nothing compiles late."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import elastic_parts, read_ladder, read_order
from jaxllm.checkpoints.peft import WEIGHTS_FILE, write_adapter
from jaxllm.elastic.ladder import Ladder, layer_parameters, sub_config
from jaxllm.elastic.units import UnitOrder, order_of_scores, reorder
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextOverflow
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder, encoder_decoder
from jaxllm.models.architectures import architecture
from jaxllm.models.lora import LoraConfig, init_adapter
from jaxllm.models.parameters import ENCODER
from jaxllm.prepare import prepare
from jaxllm.sampling import Sampling
from jaxllm.serving.elastic.profiling import measure_coarsely
from jaxllm.serving.engine.request import GenerationConfig, Session, Sliding
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.server.service import LLMService, planner_of
from tests import tiny, tiny_encdec
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


def test_a_task_prefix_is_read_before_the_source(engine, tmp_path):
    path = tiny_encdec.write_bundle(
        tmp_path / "tiny.jaxllm", engine.model.bundle.layout.weights, prefix="hello "
    )
    with_prefix = Engine.open(path, options=SMALL, warm_up=False)
    # One request compiles only its own buckets.
    answer = with_prefix.stream("the", LONG)
    with_prefix.warm_up(prompt_tokens=answer.prompt_tokens, max_tokens=12)
    assert answer.result().tokens == engine.generate("hello the", LONG).tokens
    with_prefix.close()


def test_adapters_change_both_sides(path, tmp_path):
    """What they change is what merging them would: `test_rooms.py`."""
    with Bundle.open(path) as bundle:
        cfg = bundle.cfg
    lora = LoraConfig(rank=2, alpha=4)
    draw, adapter = np.random.default_rng(0), init_adapter(cfg, lora, jax.random.key(0))
    adapter = {name: draw.normal(size=each.shape).astype(np.float32) * 0.3 for name, each in adapter.items()}
    write_adapter(tmp_path / "lora", cfg, lora, adapter)
    with safe_open(tmp_path / "lora" / WEIGHTS_FILE, framework="np") as file:
        names = set(file.keys())
    for module in ("encoder.block.0.layer.0.SelfAttention.q", "decoder.block.1.layer.1.EncDecAttention.v"):
        assert f"base_model.model.{module}.lora_A.weight" in names
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


def test_services_answer_one_source(engine):
    profile = measure_coarsely(engine)
    # The longest source, though it leaves no room of 17 tokens in the context.
    assert profile.tokens == (16,)
    service = LLMService.of_engine(engine, planner_of(engine, profile), profile)
    answer = service.call("the", instruction="hello", max_tokens=12, sampling=LONG.sampling).result()
    assert answer.tokens == engine.generate("hello\nthe", LONG).tokens[: len(answer.tokens)]


def test_a_switch_folder_of_pickles(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "switch_transformers"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text(tiny.tiny_tokenizer().tokenizer_json)
    with pytest.raises(CheckpointError, match=r"only as pickles .*save_pretrained"):
        prepare(tmp_path, tmp_path.parent / "out.jaxllm")


# Levels: units of both sides in order, and sub-models as counts of them.


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
