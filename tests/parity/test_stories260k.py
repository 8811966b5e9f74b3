"""The real stories260K model: transformers' logits on real text, and its greedy stories word for word."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests import tiny_hf

PROMPTS, NEW_TOKENS = 20, 200
# One bucket for all prompts; a longer first sentence is cut.
PROMPT_TOKENS = 64


@pytest.fixture(scope="module")
def model(stories_folder):
    """(config, parameters) of stories260K."""
    cfg = read_config(stories_folder)
    return cfg, {name: jnp.asarray(value) for name, value in read_params(stories_folder, cfg)}


@pytest.fixture(scope="module")
def theirs(stories_folder):
    return tiny_hf.load(stories_folder)


@pytest.fixture(scope="module")
def documents(data_dir, stories_folder):
    """The first validation stories as token ids, each with the count of its first sentence's."""
    path = data_dir / "text" / "tinystories_valid.txt"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    tokenizer = Tokenizer.from_file(str(stories_folder / "tokenizer.json"))
    stories = [each.strip() for each in path.read_text(encoding="utf-8").split("<|endoftext|>")]
    found = []
    for story in [each for each in stories if "." in each][:PROMPTS]:
        sentence = story[: story.index(".") + 1]
        count = len(tokenizer.encode(sentence).ids)
        found.append((np.asarray(tokenizer.encode(story).ids, np.int32), min(count, PROMPT_TOKENS)))
    return found


def test_logits_of_a_full_window(model, theirs, documents):
    cfg, params = model
    text = np.concatenate([ids for ids, _ in documents])[: cfg.window_tokens][None]
    assert text.shape[1] == 512

    @jax.jit
    def whole(params, tokens):
        hidden, _ = decoder.forward(params, tokens, cfg=cfg)
        return decoder.logits(params, hidden, cfg=cfg)

    got, expected = np.asarray(whole(params, text)), tiny_hf.logits(theirs, text)
    assert np.abs(got - expected).max() < 1e-3
    # The model knows this kind of text: a mix-up that both sides share would show here.
    chosen = np.take_along_axis(jax.nn.log_softmax(got[0, :-1]), text[0, 1:, None], axis=-1)
    assert -np.mean(chosen) < 2.0


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
def test_greedy_stories(model, theirs, documents):
    import torch

    cfg, params = model
    assert len(documents) == PROMPTS
    # One padded batch for transformers (on the left, as it wants it): token by token it is slow.
    prompts = torch.zeros((PROMPTS, PROMPT_TOKENS), dtype=torch.int64)
    real = torch.zeros_like(prompts)
    for row, (ids, count) in enumerate(documents):
        prompts[row, -count:] = torch.from_numpy(ids[:count].astype(np.int64))
        real[row, -count:] = 1
    with tiny_hf.quiet():
        answer = theirs.generate(
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
    for (ids, count), story in zip(documents, expected, strict=True):
        padded = np.zeros((1, PROMPT_TOKENS), np.int32)
        padded[0, :count] = ids[:count]
        ours = greedy(params, padded, np.int32(count), cfg=cfg)
        np.testing.assert_array_equal(ours, story)
