"""Engines of models with state layers, which follow the conversation, however it is fed, stopped or cut; and
of models with layers of two sizes."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.config import RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import new_cache, stack_places
from jaxllm.kv.states import states_bytes
from jaxllm.layer_configs import MixedLayers
from jaxllm.models import decoder
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig, Session, Sliding, common_prefix
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.weights.memory_plan import cache_bytes
from tests import tiny, tiny_states
from tests.serving.memory import budget

# Layers that have heads of two sizes, share keys and values, and read the tokens (Gemma 4). Scores are not
# scaled, so that they are large: halves in the cache would move answers.
MIXED = dataclasses.replace(
    tiny.TINY, model_type="gemma4_text", layers=6, qk_norm=True, post_norms=True, attention_scale=1.0,
    activation="gelu_tanh", tied_head=True, attention_windows=(5, 0) * 3, embed_scale=8.0,
    rope=RopeConfig(dim=32, kind="proportional", rotated_dim=8), local_rope=RopeConfig(dim=16),
    mixed=MixedLayers(
        full_head_dim=32, full_kv_heads=1, shared_kv_layers=2, shared_ffn_size=96, layer_input_size=32
    ),
)  # fmt: skip
SMALL = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(32, 64), decode_block=4)
PROMPT = [5, 9, 2, 44, 17, 3, 3, 8, 61, 20, 7]


def written(folder, kind, weights):
    path = folder / f"{kind}.jaxllm"
    if kind == "mixed":
        return tiny.write_tiny_bundle(path, weights, cfg=MIXED)
    return tiny_states.write_bundle(path, kind, weights)


def options_of(path, **more):
    return dataclasses.replace(SMALL, cache_dtype="float32" if path.stem == "mixed" else "", **more)


# Kinds of states and widths of weights have nothing to do with each other.
@pytest.fixture(
    scope="module",
    params=[
        ("short_conv", "int8"),
        ("delta_rule", "f32"),
        ("mixed", "int8"),
        pytest.param(("delta_rule", "int8"), marks=pytest.mark.campaign),
    ],
    ids=" ".join,
)
def path(request, tmp_path_factory):
    return written(tmp_path_factory.mktemp("model"), *request.param)


@pytest.fixture(scope="module")
def engine(path):
    engine = Engine.open(path, options=options_of(path))
    yield engine
    engine.close()


def asked(max_tokens=12, **options):
    options.setdefault("sampling", Sampling(temperature=0))
    return GenerationConfig(max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def scores(engine):
    """Logits `[T, V]` of a sequence by a forward pass over the whole, without a cache."""
    params = engine.model.bundle.load()

    @jax.jit
    def whole(params, tokens):
        hidden, _ = decoder.forward(params, tokens, cfg=engine.cfg)
        return decoder.logits(params, hidden, cfg=engine.cfg)[0]

    def run(sequence):
        row = np.zeros((1, SMALL.context_tokens), np.int32)
        row[0, : len(sequence)] = sequence
        return np.asarray(whole(params, jnp.asarray(row)))[: len(sequence)]

    return run


@pytest.fixture(scope="module")
def follows(scores):
    """A check that each token of a sequence after a prompt of so many tokens has the highest logit but for
    rounding."""

    def check(sequence, prompt):
        found = scores(sequence)
        for at in range(prompt, len(sequence)):
            before = found[at - 1]
            # Two kernels may round differently; another state gives other logits altogether.
            assert before[sequence[at]] > before.max() - 0.02 * before.std(), f"token {at}"

    return check


def test_prompts_around_chunk_and_cache_lengths(engine, follows):
    built = dict(engine.model.runners.buckets.bucket_ms)
    for count in (1, 3, 15, 16, 17, 33, 40):
        prompt = np.random.default_rng(count).integers(0, tiny.VOCAB_SIZE, count).tolist()
        follows([*prompt, *engine.generate(prompt, asked()).tokens], count)
    drawn = asked(40, sampling=Sampling(temperature=0.8, seed=3))
    assert engine.generate(PROMPT, drawn).tokens == engine.generate(PROMPT, drawn).tokens
    assert engine.model.runners.buckets.bucket_ms == built
    assert engine.runner.batch is None


def test_a_conversation_goes_on(engine, follows):
    session = Session()
    first = engine.stream(PROMPT, asked(7), session=session).result()
    prompt = [*PROMPT, *first.tokens, 4, 4, 9] * 2
    second = engine.stream(prompt, asked(), session=session).result()
    # All but the answer's last token, which was never fed.
    assert second.reused_tokens == len(PROMPT) + 6
    follows([*prompt, *second.tokens], len(prompt))
    # What states have gone beyond is computed again; keys and values of another end are dropped.
    for prompt in (PROMPT[:5], PROMPT, [*PROMPT[:7], 1, 1, 1], [9]):
        session = Session()
        engine.stream(PROMPT, asked(), session=session).result()
        again = engine.stream(prompt, asked(), session=session).result()
        common = common_prefix(PROMPT, prompt[:-1]) if engine.cfg.states is None else 0
        assert again.reused_tokens == common
        follows([*prompt, *again.tokens], len(prompt))
    # Tokens after a stop string are no part of a conversation.
    whole, session = engine.generate(PROMPT, asked()), Session()
    text = engine.tokenizer.decode(whole.tokens[:2])
    stopped = engine.stream(PROMPT, asked(stop=(text[-1:],)), session=session).result()
    assert len(stopped.tokens) < len(whole.tokens)
    prompt = [*PROMPT, *stopped.tokens, 7]
    again = engine.stream(prompt, asked(), session=session).result()
    follows([*prompt, *again.tokens], len(prompt))


def test_a_sequence_that_slides_begins_its_states_anew(engine, follows):
    answer = engine.stream(PROMPT, asked(80), sliding=Sliding(sink_tokens=3)).result()
    assert len(answer.tokens) == 80
    if engine.cfg.states is None:
        return
    # After the first slide the sequence is that of `Answer.sequence`, as if it had been the prompt.
    kept = answer.sequence
    assert len(kept) < SMALL.context_tokens
    fresh = engine.generate(kept[:-4], asked(4))
    follows([*kept[:-4], *fresh.tokens], len(kept) - 4)
    assert fresh.tokens == kept[-4:]


def test_what_these_models_are_refused(path, engine):
    mixed = path.stem == "mixed"
    kind = "models with layers of two sizes" if mixed else "models with state layers"
    refused = [
        ({"kv_codec": "channel"}, f"contexts: not for {kind}" if mixed else "kept as they are"),
        ({"adapter_rank": 4}, f"adapters: not for {kind}"),
    ]
    if mixed:
        refused.append(({"memory_bytes": budget(engine, 0.5)}, f"streamed weights: not for {kind}"))
    else:
        with pytest.raises(ConfigError, match=f"drafter: not for {kind}"):
            Engine.open(path, options=SMALL, speculation=SpeculationOptions(model=path))
    for change, match in refused:
        with pytest.raises(ConfigError, match=match):
            Engine.open(path, options=options_of(path, **change))
    with pytest.raises(ConfigError, match=f"tasks: not for {kind}"):
        Scorer(engine.runner).score_end([1], [2], engine.runner.empty_cache(32))


def test_the_memory_of_states_and_layers_that_share():
    # Two states, of 3 inputs of 2·2·16 + 4·16 channels and of 4 matrices.
    assert states_bytes(tiny_states.DELTA_RULE) == 3 * 4 * (3 * 128 + 4 * 16 * 16)
    assert stack_places(MIXED) == ((0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1))
    cache = new_cache(MIXED, batch=1, tokens=8, dtype=jnp.float32, stacked=False)
    assert [rows.shape for rows in cache.keys] == [(2, 1, 2, 8, 16), (2, 1, 1, 8, 32)]
    # Two layers with 2 heads of 16, and two with one of 32: keys and values in four bytes.
    floats = dataclasses.replace(SMALL, cache_dtype="float32")
    assert cache_bytes(MIXED, floats) == 2 * 4 * 32 * 4 * (32 + 64)
    for change, match in (
        ({"shared_kv_layers": 5}, "no layer before them of their kind"),
        ({"full_kv_heads": 3}, "multiple of full_kv_heads"),
    ):
        with pytest.raises(ConfigError, match=match):
            dataclasses.replace(MIXED, mixed=dataclasses.replace(MIXED.mixed, **change))


@pytest.mark.parametrize("kind", [*tiny_states.CONFIGS, "mixed"])
def test_drafted_answers(kind, tmp_path):
    """Drafts of another model for states; a model of two sizes drafts for itself: both read trees."""
    path = written(tmp_path, kind, "int8" if kind == "mixed" else "f32")
    draft = path if kind == "mixed" else tiny.write_tiny_bundle(tmp_path / "draft.jaxllm")
    # Verifies each tree, however much it pays.
    trees = TreeShape(nodes=(8,), room=8, trimmed=False)
    how = SpeculationOptions(model=draft, trees=trees, fallback="fixed", alpha=1e-6, pausing=False)
    short = options_of(path, context_tokens=32, cache_tokens=(32,))
    with contextlib.closing(Engine.open(path, options=short, speculation=how)) as drafting:
        plain, session = drafting.at(100), Session()
        answer = drafting.stream(PROMPT[:4], asked(), session=session).result()
        assert answer.tokens == plain.generate(PROMPT[:4], asked()).tokens
        counts = drafting.speculation.counts
        assert counts.verifications > 0
        assert kind != "mixed" or counts.accepted > counts.verifications
        # The states are those of the accepted tokens alone.
        longer = [*PROMPT[:4], *answer.tokens, 3]
        second = plain.stream(longer, asked(8), session=session).result()
        assert second.reused_tokens == len(longer) - 2
        assert second.tokens == plain.generate(longer, asked(8)).tokens
