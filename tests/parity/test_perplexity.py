"""The real stories260K model on real text: transformers' perplexity and greedy stories, and what each weight
width costs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxllm import Engine, EngineOptions
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.serving.evaluation.texts import perplexity
from jaxllm.serving.runners.scorer import Scorer
from tests import tiny_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
shipped = pytest.mark.usefixtures("shipped_compilations")

SEPARATOR = "<|endoftext|>"
BATCH = 16


@pytest.fixture(scope="module")
def documents(data_dir):
    path = data_dir / "text" / "tinystories_valid.txt"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    text = path.read_text(encoding="utf-8")
    return [document for document in text.split(SEPARATOR) if document.strip()]


def their_perplexity(folder, encoded, window):
    """Perplexity over the same windows, in batches padded on the right (where no token looks)."""
    with tiny_hf.quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    windows = [ids[at : at + window + 1] for ids in encoded for at in range(0, len(ids) - 1, window)]
    windows.sort(key=len)
    loss = 0.0
    with torch.no_grad():
        for at in range(0, len(windows), BATCH):
            rows = [torch.tensor(ids) for ids in windows[at : at + BATCH]]
            batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
            scores = model(batch[:, :-1].clamp(min=0)).logits.double()
            targets = batch[:, 1:]
            loss += float(torch.nn.functional.cross_entropy(scores.mT, targets, reduction="sum"))
    return math.exp(loss / sum(len(ids) - 1 for ids in windows))


def engine_at(folder, weights):
    return Engine.open(folder, weights=weights, warm_up=False)


@shipped
@pytest.mark.slow
def test_whole_validation_text_to_four_digits(stories_folder, documents):
    engine = engine_at(stories_folder, "f32")
    ours = perplexity(engine, documents)
    encoded = [engine.tokenizer.encode(text) for text in documents]
    expected = their_perplexity(stories_folder, encoded, ours.window_tokens)
    assert f"{ours.perplexity:.4f}" == f"{expected:.4f}"


@shipped
def test_scores_of_a_text_and_its_ends(stories_folder):
    """As the service tells them: log-probabilities, ranks and the likeliest tokens."""
    engine = engine_at(stories_folder, "f32")
    ids = engine.tokenizer.encode("Once upon a time there was a little girl, who had a red ball. " * 12)
    ends = (tuple(engine.tokenizer.encode(" She was happy.", add_special_tokens=False)), (7,))
    scoring = Scorer(engine.runner).scoring(ids, ends, top=3)
    while scoring.step():
        pass
    model = tiny_hf.load(stories_folder)
    for found, tokens, begins in zip(
        scoring.scores, (ids, *((*ids, *end) for end in ends)), (1, *[len(ids)] * 2), strict=True
    ):
        rows = torch.log_softmax(torch.from_numpy(tiny_hf.logits(model, np.array([tokens]))).double(), -1)
        rows = rows[0, begins - 1 : -1].numpy()
        chosen = rows[np.arange(len(rows)), tokens[begins:]]
        np.testing.assert_allclose(found.logprobs[0], chosen, atol=1e-3)
        np.testing.assert_allclose(found.top_logprobs[0], -np.sort(-rows, axis=-1)[:, :3], atol=1e-3)
        # Of tokens that are as likely as others up to rounding the rank may differ.
        assert (found.ranks[0] == 1 + (rows > chosen[:, None]).sum(axis=-1)).mean() > 0.98


@pytest.fixture(scope="module")
def full(stories_folder, documents):
    """The perplexity of some documents by the weights as they are."""
    return perplexity(engine_at(stories_folder, "f32"), documents[:40]).perplexity


# Bounds on the relative increase, from the formats' error: a sixteenth of a bit for 8-bit weights is
# nothing, 16 levels on a model of 260 K parameters are felt.
@shipped
@pytest.mark.parametrize(
    ("weights", "bound"),
    [("bf16", 0.002), ("int8", 0.01), ("int4", 0.08), ("int4-all", 0.3)],
)
def test_narrow_weights_cost_little(stories_folder, documents, full, weights, bound):
    narrow = perplexity(engine_at(stories_folder, weights), documents[:40]).perplexity
    assert abs(narrow / full - 1) < bound


@shipped
@pytest.mark.slow
def test_outliers_of_a_real_model_cost_little(data_dir):
    """By squared differences of log-probabilities, which are twice what a token costs while that is little:
    one scale for all of 256 activations, outliers among them, would give 0.05."""
    model = data_dir / "models" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    text = data_dir / "text" / "wikitext2_valid.txt"
    if not (model.is_file() and text.is_file()):
        pytest.skip(f"{model} or {text} is missing")
    found = []
    for weights in ("f32", "int8"):
        options = EngineOptions(context_tokens=256, chunk_tokens=(256,), cache_tokens=(256,))
        engine = Engine.open(model, weights=weights, options=options, warm_up=False)
        ids = engine.tokenizer.encode(text.read_text(encoding="utf-8")[:4000])[:257]
        scorer = Scorer(engine.runner)
        scorer.prepare(256)
        found.append(scorer.score(ids[:-1], ids[1:]))
    assert np.square(found[0] - found[1]).mean() < 0.02


PROMPTS, NEW_TOKENS = 20, 200
# One bucket for all prompts; a longer first sentence is cut.
PROMPT_TOKENS = 64


@functools.partial(jax.jit, static_argnames="cfg")
def greedy(params, prompt, valid, *, cfg):
    """The `NEW_TOKENS` most likely tokens after the first `valid` of `prompt` `[1, PROMPT_TOKENS]`."""

    def step(tokens, cache, valid):
        hidden, cache = decoder.forward(params, tokens, cache, cfg=cfg, valid=valid)
        last = jax.lax.dynamic_slice_in_dim(hidden, valid - 1, 1, axis=1)
        chosen = jnp.argmax(decoder.logits(params, last, cfg=cfg), axis=-1).astype(jnp.int32)
        return chosen, cache

    def decode(carry, _):
        token, cache = carry
        return step(token, cache, jnp.int32(1)), token[0, 0]

    cache = new_cache(cfg, batch=1, tokens=PROMPT_TOKENS + NEW_TOKENS, dtype=jnp.float32)
    _, story = jax.lax.scan(decode, step(prompt, cache, valid), length=NEW_TOKENS)
    return story


@pytest.mark.slow
def test_greedy_stories(stories_folder, documents):
    """What follows the first sentences of the first validation stories, word for word."""
    cfg = read_config(stories_folder)
    params = {name: jnp.asarray(value) for name, value in read_params(stories_folder, cfg)}
    tokenizer, begun = Tokenizer.from_file(str(stories_folder / "tokenizer.json")), []
    for story in [each.strip() for each in documents if "." in each][:PROMPTS]:
        ids = np.asarray(tokenizer.encode(story).ids, np.int32)
        count = len(tokenizer.encode(story[: story.index(".") + 1]).ids)
        begun.append((ids, min(count, PROMPT_TOKENS)))
    assert len(begun) == PROMPTS
    # One padded batch for transformers (on the left, as it wants it): token by token it is slow.
    prompts = torch.zeros((PROMPTS, PROMPT_TOKENS), dtype=torch.int64)
    real = torch.zeros_like(prompts)
    for row, (ids, count) in enumerate(begun):
        prompts[row, -count:] = torch.from_numpy(ids[:count].astype(np.int64))
        real[row, -count:] = 1
    with tiny_hf.quiet():
        answer = tiny_hf.load(stories_folder).generate(
            prompts,
            attention_mask=real,
            do_sample=False,
            use_cache=True,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected = answer[:, PROMPT_TOKENS:].numpy()
    assert expected.shape == (PROMPTS, NEW_TOKENS)
    for (ids, count), story in zip(begun, expected, strict=True):
        padded = np.zeros((1, PROMPT_TOKENS), np.int32)
        padded[0, :count] = ids[:count]
        ours = greedy(params, padded, np.int32(count), cfg=cfg)
        np.testing.assert_array_equal(ours, story)
