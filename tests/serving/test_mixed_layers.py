"""Engines of models whose layers have heads of two sizes, share keys and values, and read the tokens (Gemma
4)."""

import contextlib
import dataclasses

import jax.numpy as jnp
import pytest

from jaxllm import Engine
from jaxllm.config import RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import new_cache, stack_places
from jaxllm.layer_configs import MixedLayers
from jaxllm.models.features import ROOMS, room_refusal
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.sliding import Sliding
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.weights.footprint import cache_bytes
from tests import tiny
from tests.serving.follows import follows_forward_passes
from tests.serving.weights.conftest import budget

CFG = dataclasses.replace(
    tiny.TINY, model_type="gemma4_text", layers=6, qk_norm=True, post_norms=True, attention_scale=1.0,
    activation="gelu_tanh", tied_head=True, attention_windows=(5, 0) * 3, embed_scale=8.0,
    rope=RopeConfig(dim=32, kind="proportional", rotated_dim=8), local_rope=RopeConfig(dim=16),
    mixed=MixedLayers(
        full_head_dim=32, full_kv_heads=1, shared_kv_layers=2, shared_ffn_size=96, layer_input_size=32
    ),
)  # fmt: skip
# Scores are not scaled, so that they are large: halves in the cache would move answers.
SMALL = EngineOptions(
    context_tokens=64, chunk_tokens=(16,), cache_tokens=(32, 64), decode_block=4, cache_dtype="float32"
)
PROMPT = [5, 9, 2, 44, 17, 3, 3, 8, 61, 20, 7]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_tiny_bundle(tmp_path_factory.mktemp("model") / "tiny.jaxllm", "int8", cfg=CFG)


@pytest.fixture(scope="module")
def engine(path):
    engine = Engine.open(path, options=SMALL)
    yield engine
    engine.close()


def asked(max_tokens=12):
    return GenerationConfig(max_tokens=max_tokens, ignore_eos=True, sampling=Sampling(temperature=0))


@pytest.fixture(scope="module")
def follows(engine):
    return follows_forward_passes(engine)


def test_layers_that_share_have_no_cache_of_their_own():
    assert stack_places(CFG) == ((0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1))
    cache = new_cache(CFG, batch=1, tokens=8, dtype=jnp.float32, stacked=False)
    assert [rows.shape for rows in cache.keys] == [(2, 1, 2, 8, 16), (2, 1, 1, 8, 32)]
    # Two layers with 2 heads of 16, and two with one of 32: keys and values in four bytes.
    assert cache_bytes(CFG, SMALL) == 2 * 4 * 32 * 4 * (32 + 64)


def test_a_conversation_goes_on(engine, follows):
    session = Session()
    first = engine.stream(PROMPT, asked(7), session=session).result()
    follows([*PROMPT, *first.tokens], len(PROMPT))
    prompt = [*PROMPT, *first.tokens, 4, 4, 9] * 2
    second = engine.stream(prompt, asked(), session=session).result()
    assert second.reused_tokens == len(PROMPT) + 6
    follows([*prompt, *second.tokens], len(prompt))
    # Keys and values of another end are dropped.
    again = engine.stream(PROMPT[:6], asked(), session=session).result()
    assert again.reused_tokens == 5
    follows([*PROMPT[:6], *again.tokens], 6)


def test_a_sequence_that_outgrows_the_context(engine):
    answer = engine.stream(PROMPT, asked(80), sliding=Sliding(sink_tokens=3)).result()
    assert len(answer.tokens) == 80
    assert engine.runner.batch is None


def test_drafted_answers_are_those_without(path):
    """The model drafts for itself: both read trees."""
    trees = TreeShape(nodes=(8,), room=8, trimmed=False)
    options = SpeculationOptions(model=path, trees=trees, fallback="fixed", alpha=1e-6, pausing=False)
    short = dataclasses.replace(SMALL, context_tokens=32, cache_tokens=(32,))
    with contextlib.closing(Engine.open(path, options=short, speculation=options)) as drafting:
        answer = drafting.generate(PROMPT, asked())
        assert answer.tokens == drafting.at(100).generate(PROMPT, asked()).tokens
        counts = drafting.speculation.counts
        assert counts.accepted > counts.verifications > 0


def test_rooms_that_refuse(path, engine):
    assert {room for room in ROOMS if not room_refusal(CFG, room)} == {"drafter"}
    with pytest.raises(ConfigError, match="contexts: not for models with layers of two sizes"):
        Engine.open(path, options=dataclasses.replace(SMALL, kv_codec="channel"))
    with pytest.raises(ConfigError, match="adapters: not for models with layers of two sizes"):
        Engine.open(path, options=dataclasses.replace(SMALL, adapter_rank=4))
    with pytest.raises(ConfigError, match="tasks: not for models with layers of two sizes"):
        Scorer(engine.runner).score_end([1], [2], engine.runner.empty_cache(32))
    with pytest.raises(ConfigError, match="streamed weights: not for models with layers of two sizes"):
        Engine.open(path, options=dataclasses.replace(SMALL, memory_bytes=budget(engine, 0.5)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shared_kv_layers": 5}, "no layer before them of their kind"),
        ({"full_kv_heads": 3}, "multiple of full_kv_heads"),
        ({"shared_ffn_size": 0}, "shared_ffn_size"),
    ],
)
def test_configs_that_cannot_be(change, match):
    with pytest.raises(ConfigError, match=match):
        dataclasses.replace(CFG, mixed=dataclasses.replace(CFG.mixed, **change))


def test_configs_survive_json():
    assert type(CFG).from_json(CFG.to_json()) == CFG
    assert "rotated_dim" not in tiny.TINY.to_json()["rope"]
