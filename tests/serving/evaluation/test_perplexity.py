import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import Engine, EngineOptions
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.models.decoder import forward, logits
from jaxllm.quant import dequantize
from jaxllm.quant.parts import high_planes
from jaxllm.serving.evaluation.perplexity import perplexity
from tests.serving.speculation.test_speculative import CFG, sharp
from tests.tiny import write_tiny_bundle

DOCUMENTS = ["the cat sat on the mat. " * 8, "a dog", "ran and ran to the end of the road. " * 5]


def reference(engine, documents, window):
    """Sum of negative log-likelihoods, and their number, from whole-window logits."""
    params = engine.model.bundle.load()

    @jax.jit
    def scored(tokens):
        hidden, _ = forward(params, tokens, cfg=engine.cfg)
        return jax.nn.log_softmax(logits(params, hidden, cfg=engine.cfg), axis=-1)

    loss, count = 0.0, 0
    for text in documents:
        ids = engine.tokenizer.encode(text)
        for at in range(0, len(ids) - 1, window):
            targets = ids[at + 1 : at + window + 1]
            inputs = np.zeros((1, window), np.int32)
            inputs[0, : len(targets)] = ids[at : at + len(targets)]
            scores = scored(inputs)
            loss -= sum(float(scores[0, i, token]) for i, token in enumerate(targets))
            count += len(targets)
    return loss, count


@pytest.mark.parametrize("window", [20, 128])
def test_equals_the_definition_for_windows_within_and_beyond_a_chunk(engine, window):
    result = perplexity(engine, DOCUMENTS, window_tokens=window)
    loss, count = reference(engine, DOCUMENTS, window)
    assert result.tokens == count
    assert result.documents == 3
    assert result.perplexity == pytest.approx(math.exp(loss / count), rel=1e-5)
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert result.bits_per_byte == pytest.approx(loss / math.log(2) / size, rel=1e-5)


@pytest.mark.skipif(not native.kernels().native, reason="planes are read by native kernels")
def test_high_planes_predict_as_a_model_of_their_own(tmp_path):
    options = EngineOptions(context_tokens=64, chunk_tokens=(32,))
    nested = Engine.open(
        write_tiny_bundle(tmp_path / "nested.jaxllm", "int8-nested", cfg=CFG, params=sharp(CFG)),
        options=options,
        warm_up=False,
    )
    params = {
        name: np.asarray(dequantize(weight, jnp.dtype(jnp.float32)))
        for name, weight in high_planes(nested.model.bundle.load()).items()
    }
    alone = Engine.open(
        write_tiny_bundle(tmp_path / "high.jaxllm", cfg=CFG, params=params), options=options, warm_up=False
    )
    high = perplexity(nested, DOCUMENTS, high_planes=True).perplexity
    both, expected = (perplexity(each, DOCUMENTS).perplexity for each in (nested, alone))
    # Activations are quantized in one of them alone.
    assert abs(high - expected) < 0.5 * abs(high - both)
    with pytest.raises(ConfigError, match=r"predict by its high planes, because it has f32 weights"):
        perplexity(alone, DOCUMENTS, high_planes=True)


def test_progress_ends_at_the_number_of_tokens(engine):
    seen = []
    result = perplexity(engine, DOCUMENTS, progress=lambda *call: seen.append(call))
    scored = [call[1:] for call in seen if call[0] == "score"]
    assert scored[-1] == (result.tokens, result.tokens)
    assert scored == sorted(scored)


def test_a_text_without_a_token_to_predict_is_refused(engine):
    with pytest.raises(ConfigError, match="no token to predict"):
        perplexity(engine, [""])


@pytest.mark.parametrize("window", [-1, 129])
def test_a_window_must_fit_the_context(engine, window):
    with pytest.raises(ConfigError, match="window"):
        perplexity(engine, DOCUMENTS, window_tokens=window)


@pytest.mark.slow
def test_a_short_document_needs_no_graph_of_its_own(tiny_bundle):
    """Caches that other requests made ready, shorter than the window's, have no graph that scores."""
    options = EngineOptions(context_tokens=128, chunk_tokens=(32,), cache_tokens=(32, 128), decode_block=1)
    engine = Engine.open(tiny_bundle, options=options)
    assert perplexity(engine, ["a dog"], window_tokens=128).tokens == 5
