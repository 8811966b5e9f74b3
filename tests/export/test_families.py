"""Every family that the table of families has in TFLite gives the decoder's log-probabilities there.

The laws of other rooms are in `tests/parity/test_rooms.py`, and say that the decoder's are transformers'.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.export.programs.model import open_program
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder, encoder_decoder
from jaxllm.models.architectures import ARCHITECTURES
from jaxllm.models.features import feature_refusal
from jaxllm.models.parameters import param_specs
from jaxllm.serving.engine.request import GenerationConfig
from tests import tiny, tiny_encdec
from tests.docs.families import default_config
from tests.quick_jit import jit
from tests.tiny_variants import ENCODER_DECODERS, VARIANTS

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from jaxllm.export.tflite import export_tflite

TOLERANCE = 1e-3
CONTEXT, CHUNK, ASKED = 48, 16, 6
FAMILIES = [name for name in ARCHITECTURES if not feature_refusal(default_config(name), "tflite")]
PROMPT = np.random.default_rng(0).integers(3, tiny.VOCAB_SIZE, 23).tolist()


def config_of(name):
    """The config of the family's tiny variant."""
    variant = {"gemma3_text": "gemma3"}.get(name, name)
    _, keys = (VARIANTS | ENCODER_DECODERS)[variant]
    return ARCHITECTURES[name].config_from_hf({**keys, "vocab_size": tiny.VOCAB_SIZE, "model_type": name})


def params_of(cfg):
    """Random parameters whose norms and biases are far from ones and zeros."""
    draw, found = np.random.default_rng(3), {}
    for name, spec in param_specs(cfg).items():
        noise = draw.normal(size=spec.shape).astype(np.float32)
        if spec.role == "vector":
            found[name] = 0.3 * noise + float("norm" in name and "bias" not in name)
        else:
            found[name] = noise * spec.shape[-1] ** -0.5
    return found


def scores_of(cfg, params, tokens, source):
    """The decoder's log-probabilities `[T, V]`."""
    row = np.asarray([tokens], np.int32)

    @jit
    def run(params):
        cache = None
        if cfg.encoder is not None:
            cache = new_cache(cfg, batch=1, tokens=CONTEXT, dtype=jnp.float32)
            encoder, length = encoder_decoder.encoder_params(params), np.int32(len(source))
            ids = np.asarray([source], np.int32)
            cache = encoder_decoder.read_source(params, encoder, ids, length, cache, cfg=cfg)
        hidden, _ = decoder.forward(params, row, cache, cfg=cfg)
        return jax.nn.log_softmax(decoder.logits(params, hidden, cfg=cfg)[0])

    return np.asarray(run({name: jnp.asarray(each) for name, each in params.items()}))


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_are_the_decoders(name, tmp_path):
    cfg = config_of(name)
    params = params_of(cfg)
    tokenizer = tiny.tiny_tokenizer() if cfg.encoder is None else tiny_encdec.tokenizer()
    bundle = tiny.write_tiny_bundle(tmp_path / "tiny.jaxllm", cfg=cfg, params=params, tokenizer=tokenizer)
    plan = ExportPlan(context_tokens=CONTEXT, chunk_tokens=(CHUNK,), cache_tokens=())
    export_tflite(read_subject(bundle), tmp_path / "tflite", plan)
    engine = open_program(tmp_path / "tflite", threads=1)
    config = GenerationConfig(max_tokens=ASKED, ignore_eos=True, top_logprobs=20)
    answer = engine.generate(PROMPT, config)
    begun, source = (PROMPT, []) if cfg.encoder is None else ([tiny.BEGIN_ID], PROMPT)
    wanted = scores_of(cfg, params, [*begun, *answer.tokens], source)[len(begun) - 1 :]
    assert wanted.std() > 0.1
    assert len(answer.logprobs) == ASKED
    for at, each in enumerate(answer.logprobs):
        for token, logprob in ((each.token, each.logprob), *each.top):
            assert abs(logprob - wanted[at][token]) < TOLERANCE, f"token {at}"
