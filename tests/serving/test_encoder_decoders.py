"""Engines of encoder-decoders: answers of a source, what they are refused, and that nothing compiles late."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.checkpoints.peft import WEIGHTS_FILE, write_adapter
from jaxllm.errors import CheckpointError, ConfigError, ContextOverflow
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder, encoder_decoder
from jaxllm.models.lora import LoraConfig, init_adapter
from jaxllm.prepare import prepare
from jaxllm.sampling import Sampling
from jaxllm.serving.elastic.profiling import measure_coarsely
from jaxllm.serving.engine.request import GenerationConfig, Session, Sliding
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.server.service import LLMService, planner_of
from tests import tiny, tiny_encdec

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
