"""Text models of multimodal folders give transformers' logits, and what is not one is refused by name."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.huggingface import Checkpoint, read_config, read_params
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import decoder
from jaxllm.models.wrappers import WRAPPERS

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests import tiny_hf
from tests.quick_jit import jit

TOLERANCE = 1e-3
TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "smolvlm": "llama",
}


@pytest.fixture(scope="module", params=sorted(WRAPPERS))
def case(request, tmp_path_factory):
    """(model_type, folder) of one wrapper."""
    return request.param, tiny_hf.save_wrapper(request.param, tmp_path_factory.mktemp("wrapper"))


def logits(folder, tokens):
    cfg = read_config(folder)
    params = {name: jnp.asarray(value) for name, value in read_params(folder, cfg)}

    @jit
    def whole(params, tokens):
        return decoder.logits(params, decoder.forward(params, tokens, cfg=cfg)[0], cfg=cfg)

    return np.asarray(whole(params, tokens))


def changed(folder, to, change):
    """A copy of a folder's config.json and weights, the config changed."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (to / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors"), to / "model.safetensors")
    return to


def test_logits_of_text(case):
    model_type, folder = case
    # Below the ids of images.
    tokens = np.random.default_rng(1).integers(0, tiny_hf.FIRST_IMAGE_ID, (2, 13), dtype=np.int32)
    expected = tiny_hf.logits(tiny_hf.load(folder, wrapper=True), tokens)
    assert expected.std() > 0.3
    assert read_config(folder).model_type == TEXT_TYPES[model_type]
    assert np.abs(logits(folder, tokens) - expected).max() < TOLERANCE


@pytest.mark.parametrize("case", ["gemma3", "mistral3"], indirect=True)
def test_names_of_older_folders(case, tmp_path):
    model_type, folder = case
    (new, _), (old, _) = WRAPPERS[model_type].layouts
    stored = load_file(folder / "model.safetensors")
    older = {
        name.replace(new, old).replace("model.vision_tower.", "vision_tower."): value
        for name, value in stored.items()
    }
    older = {f"language_model.{n}" if n == "lm_head.weight" else n: value for n, value in older.items()}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(older, tmp_path / "model.safetensors")
    tokens = np.arange(5, dtype=np.int32)[None]
    np.testing.assert_array_equal(logits(tmp_path, tokens), logits(folder, tokens))


@pytest.mark.parametrize("case", ["gemma3", "qwen3_5_moe"], indirect=True)
def test_ties_keys_and_shapes_that_disagree(case, tmp_path):
    """Of the outer config and the text model's the outer tie wins; all else is refused by name."""
    model_type, folder = case
    config = json.loads((folder / "config.json").read_text())
    tied = {"tie_word_embeddings": not config["tie_word_embeddings"]}
    other = changed(folder, tmp_path / "tie", lambda config: config["text_config"].update(tied))
    assert read_config(other) == read_config(folder)
    for number, (section, key, value, match) in enumerate((
        ("text_config", "model_type", "mamba", f"{model_type} with the text model 'mamba' is not supported"),
        ("", "text_config", [], "'text_config' must be"),
        ("", "model_type", "llava", r"'llava', with the text model .* is not supported.*smolvlm"),
        ("", "model_type", [1], r"\[1\], with the text model .* is not supported"),
        ("", "new_thing", 3, "'new_thing'"),
        ("text_config", "new_thing", 3, r"--ignore-config-key text_config\.new_thing"),
    )):  # fmt: skip

        def change(config, section=section, key=key, value=value):
            (config[section] if section else config)[key] = value

        with pytest.raises(ConfigError, match=match):
            read_config(changed(folder, tmp_path / str(number), change))
    other = changed(folder, tmp_path / "key", lambda config: config["text_config"].update(new_thing=3))
    assert Checkpoint(other, ignore_keys=["text_config.new_thing"]).cfg == read_config(folder)
    size = {"moe_intermediate_size" if "moe" in model_type else "intermediate_size": 40}
    other = changed(folder, tmp_path / "size", lambda config: config["text_config"].update(size))
    with pytest.raises(CheckpointError, match=r"shape .* implies"):
        read_params(other, read_config(other))
    more = changed(folder, tmp_path / "more", lambda config: None)
    stored = load_file(more / "model.safetensors")
    save_file({**stored, "audio_tower.weight": np.zeros(2, np.float32)}, more / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds audio_tower\.weight"):
        read_params(more, read_config(more))


def test_mistral3_with_the_text_model_of_ministral3(tmp_path):
    """As Ministral 3 is published."""
    folder = tiny_hf.save_wrapper("mistral3", tmp_path / "mistral")
    ours = changed(
        folder, tmp_path / "ministral", lambda config: config["text_config"].update(model_type="ministral3")
    )
    assert read_config(ours).model_type == "ministral3"
