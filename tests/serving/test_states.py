"""Engines of models with state layers: states follow the conversation, however it is fed, stopped or cut."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.errors import ConfigError
from jaxllm.kv.states import states_bytes
from jaxllm.models import decoder
from jaxllm.models.features import ROOMS, room_refusal
from jaxllm.prepare import prepare
from jaxllm.sampling import Sampling
from jaxllm.serving.elastic.coarse_profile import measure_coarsely
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.sliding import Sliding
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.server.service import LLMService, planner_of
from tests import tiny, tiny_states
from tests.serving.follows import follows_forward_passes

SMALL = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(32, 64), decode_block=4)
PROMPT = [5, 9, 2, 44, 17, 3, 3, 8, 61, 20, 7]


@pytest.fixture(
    scope="module", params=[("short_conv", "int8"), ("delta_rule", "f32"), ("delta_rule", "int8")]
)
def path(request, tmp_path_factory):
    return tiny_states.write_bundle(tmp_path_factory.mktemp("model") / "tiny.jaxllm", *request.param)


@pytest.fixture(scope="module")
def engine(path):
    engine = Engine.open(path, options=SMALL)
    yield engine
    engine.close()


def asked(max_tokens=12, **options):
    options.setdefault("sampling", Sampling(temperature=0))
    return GenerationConfig(max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def follows(engine):
    return follows_forward_passes(engine)


@pytest.mark.parametrize("count", [1, 3, 15, 16, 17, 33, 40])
def test_prompts_around_chunk_and_cache_lengths(engine, follows, count):
    prompt = np.random.default_rng(count).integers(0, tiny.VOCAB_SIZE, count).tolist()
    answer = engine.generate(prompt, asked())
    follows([*prompt, *answer.tokens], count)


def test_sampled_answers_repeat_by_their_seed(engine):
    config = asked(sampling=Sampling(temperature=0.8, seed=3))
    assert engine.generate(PROMPT, config).tokens == engine.generate(PROMPT, config).tokens


def test_a_conversation_goes_on_from_its_state(engine, follows):
    session = Session()
    first = engine.stream(PROMPT, asked(7), session=session).result()
    prompt = [*PROMPT, *first.tokens, 4, 4, 9]
    second = engine.stream(prompt, asked(), session=session).result()
    # All but the answer's last token, which was never fed.
    assert second.reused_tokens == len(PROMPT) + 6
    follows([*prompt, *second.tokens], len(prompt))


@pytest.mark.parametrize("prompt", [PROMPT[:5], PROMPT, [*PROMPT[:7], 1, 1, 1], [9]])
def test_what_states_have_gone_beyond_is_computed_again(engine, follows, prompt):
    session = Session()
    engine.stream(PROMPT, asked(), session=session).result()
    again = engine.stream(prompt, asked(), session=session).result()
    assert again.reused_tokens == 0
    follows([*prompt, *again.tokens], len(prompt))


def test_tokens_after_a_stop_string_are_no_part_of_a_conversation(engine, follows):
    whole = engine.generate(PROMPT, asked())
    text = engine.tokenizer.decode(whole.tokens[:2])
    session = Session()
    stopped = engine.stream(PROMPT, asked(stop=(text[-1:],)), session=session).result()
    assert len(stopped.tokens) < len(whole.tokens)
    prompt = [*PROMPT, *stopped.tokens, 7]
    again = engine.stream(prompt, asked(), session=session).result()
    follows([*prompt, *again.tokens], len(prompt))


def test_a_sequence_that_slides_begins_its_states_anew(engine, follows):
    answer = engine.stream(PROMPT, asked(80), sliding=Sliding(sink_tokens=3)).result()
    assert len(answer.tokens) == 80
    # After the first slide the sequence is that of `Answer.sequence`, as if it had been the prompt.
    kept = answer.sequence
    assert len(kept) < SMALL.context_tokens
    fresh = engine.generate(kept[:-4], asked(4))
    follows([*kept[:-4], *fresh.tokens], len(kept) - 4)
    assert fresh.tokens == kept[-4:]


def test_nothing_compiles_after_warm_up(engine):
    count = len(engine.model.runners.buckets.bucket_ms)
    engine.generate(PROMPT, asked(40))
    engine.stream(PROMPT, asked(40), session=Session()).result()
    assert len(engine.model.runners.buckets.bucket_ms) == count
    assert engine.runner.batch is None


def test_text_is_scored_in_windows(engine):
    scorer = Scorer(engine.runner)
    scorer.prepare(32)
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB_SIZE, 32).tolist()
    params = engine.model.bundle.load()

    @jax.jit
    def whole(params, tokens):
        hidden, _ = decoder.forward(params, tokens, cfg=engine.cfg)
        return jax.nn.log_softmax(decoder.logits(params, hidden, cfg=engine.cfg)[0])

    scores = np.asarray(whole(params, jnp.asarray([tokens[:-1]], jnp.int32)))
    expected = scores[np.arange(31), tokens[1:]]
    assert np.abs(scorer.score(tokens[:-1], tokens[1:]) - expected).max() < 0.05


def test_a_service_without_contexts(engine):
    profile = measure_coarsely(engine)
    service = LLMService.of_engine(engine, planner_of(engine, profile), profile)
    answer = service.call("the", instruction="hello", max_tokens=1, sampling=Sampling(temperature=0))
    assert answer.result().tokens


def test_what_models_with_states_are_refused(path, engine):
    with pytest.raises(ConfigError, match="drafter: not for models with state layers"):
        Engine.open(path, options=SMALL, speculation=SpeculationOptions(model=path))
    with pytest.raises(ConfigError, match="kept as they are"):
        Engine.open(path, options=dataclasses.replace(SMALL, kv_codec="channel"))
    with pytest.raises(ConfigError, match="adapters: not for models with state layers"):
        Engine.open(path, options=dataclasses.replace(SMALL, adapter_rank=4))
    with pytest.raises(ConfigError, match="tasks: not for models with state layers"):
        Scorer(engine.runner).score_end([1], [2], engine.runner.empty_cache(32))
    refused = {room for room in ROOMS if room_refusal(engine.cfg, room)}
    assert refused == set(ROOMS) - {"contexts"}


@pytest.mark.parametrize("kind", tiny_states.CONFIGS)
def test_drafted_answers(kind, tmp_path):
    path = tiny_states.write_bundle(tmp_path / "tiny.jaxllm", kind)
    draft = tiny.write_tiny_bundle(tmp_path / "draft.jaxllm")
    short = dataclasses.replace(SMALL, context_tokens=32, cache_tokens=(32,))
    # Verifies each tree, however much it pays.
    trees = TreeShape(nodes=(8,), room=8, trimmed=False)
    options = SpeculationOptions(model=draft, trees=trees, fallback="fixed", alpha=1e-6, pausing=False)
    with contextlib.closing(Engine.open(path, options=short, speculation=options)) as drafting:
        plain, session = drafting.at(100), Session()
        answer = drafting.stream(PROMPT[:4], asked(), session=session).result()
        assert answer.tokens == plain.generate(PROMPT[:4], asked()).tokens
        counts = drafting.speculation.counts
        assert counts.verifications > 0
        # The states are those of the accepted tokens alone.
        longer = [*PROMPT[:4], *answer.tokens, 3]
        second = plain.stream(longer, asked(8), session=session).result()
        assert second.reused_tokens == len(longer) - 2
        assert second.tokens == plain.generate(longer, asked(8)).tokens


def test_folders_are_prepared(tmp_path):
    cfg = tiny_states.DELTA_RULE
    folder = tiny.write_tiny_folder(tmp_path / "folder", cfg=cfg)
    out = tmp_path / "out.jaxllm"
    prepare(folder, out, weights="int8")
    with Bundle.open(out) as bundle:
        assert bundle.cfg == cfg
    # Two states, of 3 inputs of 2·2·16 + 4·16 channels and of 4 matrices.
    assert states_bytes(cfg) == 3 * 4 * (3 * 128 + 4 * 16 * 16)
