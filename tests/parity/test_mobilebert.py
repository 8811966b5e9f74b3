"""The encoder gives transformers' hidden states: of its folders, and transformers those of ours."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoints.encoder_folders import read_encoder
from jaxllm.models.encoder.mobilebert import encoder_shapes

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from tests.models.encoder.tiny import (
    CONFIGS,
    MOBILE,
    encode,
    front_mask,
    hf_keys,
    params_of,
    random_values,
    write_encoder,
)
from tests.quick_jit import jit
from tests.tiny_hf import quiet

TOLERANCE = 1e-3
PAD = 0
COUNT = 9
LENGTHS = (9, 4, 1)
MASK = front_mask(LENGTHS, COUNT)
# Ids of real tokens are not the padding's.
TOKENS = np.where(MASK, np.random.default_rng(1).integers(1, MOBILE.vocab_size, MASK.shape), PAD).astype("i4")


def our_hidden(cfg, params):
    return np.asarray(jit(functools.partial(encode, cfg=cfg))(params, TOKENS, MASK))


def their_hidden(model, tokens=TOKENS, mask=MASK):
    with torch.no_grad():
        ids, mask = (torch.from_numpy(each).long() for each in (tokens, mask))
        return model(ids, attention_mask=mask).last_hidden_state.numpy()


def load(folder):
    with quiet():
        model, report = transformers.MobileBertModel.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    assert not any(report.values()), report
    return model.eval()


def params_with_silent_padding(cfg):
    """transformers lets a trigram see the embedding of padding, which is zero in a fresh model."""
    params = dict(params_of(cfg))
    params["embed.tokens"] = params["embed.tokens"] * (np.arange(cfg.vocab_size) != PAD)[:, None].astype("f4")
    return params


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_transformers_computes_what_we_compute(cfg, tmp_path):
    params = params_with_silent_padding(cfg)
    write_encoder(tmp_path, cfg, params, pad_token_id=PAD)
    model = load(tmp_path)
    got, expected = our_hidden(cfg, params), their_hidden(model)
    assert expected.std() > 0.3
    assert np.abs(got - expected)[MASK].max() < TOLERANCE
    again_cfg, again = read_encoder(tmp_path)
    assert again_cfg == cfg
    for name, value in params.items():
        np.testing.assert_array_equal(again[name], value)


@pytest.mark.parametrize(
    ("name", "head", "keys"),
    [
        ("mobile", "ForPreTraining", {}),
        # Its second bottleneck is stored and never used.
        ("narrow-attention", "ForTokenClassification", {"key_query_shared_bottleneck": True}),
        # Flags of a bottleneck that is not there, and a projection that is stored and never used.
        ("no-projection", "Model", {"key_query_shared_bottleneck": True, "use_bottleneck_attention": True}),
    ],
)
def test_folders_of_transformers(name, head, keys, tmp_path):
    cfg = CONFIGS[name]
    with quiet():
        torch.manual_seed(0)
        model = getattr(transformers, f"MobileBert{head}")(
            transformers.MobileBertConfig(**{**hf_keys(cfg), **keys}, attn_implementation="eager")
        ).eval()
        body = model if head == "Model" else model.mobilebert
        values = random_values({each: tuple(weights.shape) for each, weights in body.named_parameters()})
        with torch.no_grad():
            for each, weights in body.named_parameters():
                if "word_embeddings" not in each:
                    weights.copy_(torch.from_numpy(values[each]))
        model.save_pretrained(tmp_path)
    read_cfg, params = read_encoder(tmp_path)
    assert read_cfg == cfg
    assert {each: value.shape for each, value in params.items()} == encoder_shapes(cfg)
    params = {each: jnp.asarray(value) for each, value in params.items()}
    assert np.abs(our_hidden(cfg, params) - their_hidden(body))[MASK].max() < TOLERANCE
