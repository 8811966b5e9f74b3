"""Multimodal folders: texts and images give transformers' logits, and what is not one is refused by name."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.encoder_folders import read_image_encoder
from jaxllm.checkpoints.huggingface import Checkpoint, read_config, read_params
from jaxllm.errors import CheckpointError, ConfigError, JaxllmError
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.architectures import WRAPPERS
from jaxllm.models.encoder.siglip import image_rows
from jaxllm.models.layer import InputEmbeddings

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

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


PROMPT, IMAGE_ID = 12, 90


def check(folder, tokens, rows, expected):
    """Logits of a prompt, whole and in two chunks cut anywhere, of which `rows` `{place: row}` are given."""
    cfg = read_config(folder)
    params = {name: jnp.asarray(value) for name, value in read_params(folder, cfg)}
    width = len(next(iter(rows.values())))
    given = InputEmbeddings(np.zeros((PROMPT, width), np.float32), np.zeros(PROMPT, np.bool_))
    for place, row in rows.items():
        given.rows[place], given.given[place] = row, True

    @jit
    def step(params, tokens, cache, valid, inputs):
        hidden, cache = decoder.forward(params, tokens, cache, cfg=cfg, valid=valid, inputs=inputs)
        return decoder.logits(params, hidden, cfg=cfg), cache

    for split in range(1, PROMPT + 1):
        cache = new_cache(cfg, batch=1, tokens=16, dtype=jnp.float32)
        got = []
        for first, last in ((0, split), (split, PROMPT)):
            count = last - first
            if not count:
                continue
            ids, part = (
                np.zeros((1, PROMPT), np.int32),
                [np.zeros_like(each) for each in (given.rows, given.given)],
            )
            ids[0, :count] = tokens[0, first:last]
            for to, each in zip(part, (given.rows, given.given), strict=True):
                to[:count] = each[first:last]
            out, cache = step(params, ids, cache, np.int32(count), InputEmbeddings(*part))
            got.append(np.asarray(out)[0, :count])
        assert np.abs(np.concatenate(got) - expected[0]).max() < TOLERANCE, f"split at {split}"


@pytest.mark.parametrize("variant", ["llama", "gemma2", "gpt2"])
def test_inputs_embeds(tmp_path, variant):
    """Also of families that scale embeddings, or add positions to them."""
    folder = tiny_hf.save(variant, tmp_path / "m")
    model, draw = tiny_hf.load(folder), np.random.default_rng(0)
    tokens = draw.integers(0, tiny_hf.VOCAB, (1, PROMPT)).astype(np.int32)
    rows = {place: draw.normal(size=32).astype(np.float32) for place in (0, 3, 4, 9)}
    with torch.no_grad():
        inputs = model.get_input_embeddings()(torch.from_numpy(tokens.astype(np.int64))).clone()
        for place, row in rows.items():
            inputs[0, place] = torch.from_numpy(row)
        expected = model(inputs_embeds=inputs, use_cache=False).logits.numpy()
    assert expected.std() > 0.3
    check(folder, tokens, rows, expected)


def test_an_image_of_smolvlm(tmp_path):
    folder = tiny_hf.save_wrapper("smolvlm", tmp_path / "m")
    model, draw = tiny_hf.load(folder, wrapper=True), np.random.default_rng(0)
    tokens = draw.integers(0, IMAGE_ID, (1, PROMPT)).astype(np.int32)
    tokens[0, [2, 7]] = IMAGE_ID
    pixels = torch.from_numpy(draw.normal(size=(1, 2, 3, 28, 28)).astype(np.float32))
    with torch.no_grad():
        expected = model(
            torch.from_numpy(tokens.astype(np.int64)), pixel_values=pixels, use_cache=False
        ).logits
        made = torch.cat(list(model.get_image_features(pixels).pooler_output)).reshape(-1, 32).numpy()
    cfg, params = read_image_encoder(Checkpoint(folder))
    ours = np.asarray(jit(functools.partial(image_rows, cfg=cfg))(params, pixels[0].numpy())).reshape(-1, 32)
    np.testing.assert_allclose(ours, made, atol=1e-5)
    check(folder, tokens, dict(zip((2, 7), ours, strict=True)), expected.numpy())


@pytest.mark.parametrize("sizes", [{"image_size": 56, "num_hidden_layers": 2}, {"image_size": 84}])
def test_larger_images_of_smolvlm(tmp_path, monkeypatch, sizes):
    """Squares of patches in their order, 4 and 9 rows an image."""
    family, keys = tiny_hf.WRAPPERS["smolvlm"]
    larger = {**keys, "vision_config": {**keys["vision_config"], **sizes}}
    monkeypatch.setitem(tiny_hf.WRAPPERS, "smolvlm", (family, larger))
    folder, size = tiny_hf.save_wrapper("smolvlm", tmp_path / "m"), sizes["image_size"]
    pixels = np.random.default_rng(0).normal(size=(2, 3, size, size)).astype(np.float32)
    with torch.no_grad():
        made = tiny_hf.load(folder, wrapper=True).get_image_features(torch.from_numpy(pixels[None]))
    cfg, params = read_image_encoder(Checkpoint(folder))
    expected = torch.cat(list(made.pooler_output)).numpy()
    found = np.asarray(jit(functools.partial(image_rows, cfg=cfg))(params, pixels))
    assert found.shape == (2, (size // 28) ** 2, 32)
    np.testing.assert_allclose(found.reshape(-1, 32), expected.reshape(-1, 32), atol=2e-5)


def test_keys_that_are_ignored_and_image_encoders_that_are_refused(tmp_path):
    folder = tiny_hf.save_wrapper("smolvlm", tmp_path / "m")
    path, keys = folder / "config.json", ["vision_config.surprise", "surprise"]
    config = json.loads(path.read_text())
    vision = config["vision_config"]
    path.write_text(json.dumps({**config, "surprise": 1, "vision_config": {**vision, "surprise": 1}}))
    assert read_image_encoder(Checkpoint(folder, ignore_keys=keys))[0].image_size == vision["image_size"]
    for change, match in (
        ({"model_type": "llava"}, "images are read by smolvlm alone"),
        ({"vision_config": {**vision, "image_size": 30}}, "do not divide"),
        ({"vision_config": {**vision, "surprise": 1}}, "vision_config.surprise"),
        ({"vision_config": {**vision, "hidden_size": 32}}, "implies"),
        ({"vision_config": None}, "vision_config"),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(JaxllmError, match=match) as caught:
            read_image_encoder(Checkpoint(folder))
        assert "\n" not in str(caught.value)
    path.write_text(json.dumps(config))
    extra = {"model.vision_model.head.weight": np.ones((2, 2), np.float32)}
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors")
    with pytest.raises(JaxllmError, match=r"vision_model\.head\.weight"):
        read_image_encoder(Checkpoint(folder))
