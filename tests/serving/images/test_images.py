"""Images are cut as transformers cuts them, stand in prompts as its processor has them, and broken or large
ones are refused by name."""

import base64
import dataclasses
import io
import itertools

import numpy as np
import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig, PromptEmbeddings, Sampling
from jaxllm.bundle import Bundle
from jaxllm.bundle.images import image_encoder_facts
from jaxllm.checkpoints.encoder_folders import read_image_input
from jaxllm.checkpoints.huggingface import Checkpoint
from jaxllm.errors import CheckpointError, ConfigError, ContextOverflow
from jaxllm.models.encoder.image_input import ImageInput, image_text, tiles_of
from jaxllm.prepare import prepare
from jaxllm.serving.engine.request import Session, Sliding
from jaxllm.serving.images import prompt as files
from jaxllm.serving.images.prompt import (
    EncodedImage,
    image_bytes,
    image_part,
    normalized,
    open_image,
    split_images,
    tiles,
    with_images,
)
from jaxllm.text.droppable import PromptTokens
from jaxllm.text.tokenizer import Tokenizer
from tests.serving.conftest import OPTIONS
from tests.tiny import tiny_params
from tests.tiny_images import SIZES, TILE, image_id, image_tokenizer, picture, save_smolvlm

INPUT = ImageInput(
    tile=TILE, longest=2 * TILE, splits=True, mean=(0.5, 0.4, 0.5), std=(0.5, 0.5, 0.3), scale=1 / 255,
    resample=1, image_id=image_id(),
)  # fmt: skip


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("longest", [TILE, 2 * TILE, 5 * TILE - 3])
def test_tiles_are_those_of_transformers(splits, longest):
    module = pytest.importorskip("transformers.models.smolvlm.image_processing_pil_smolvlm")
    texts = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    of = dataclasses.replace(INPUT, longest=longest, splits=splits)
    theirs = module.SmolVLMImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": TILE}, do_image_splitting=splits,
        image_mean=of.mean, image_std=of.std,
    )  # fmt: skip
    from PIL import Image

    names = ("<fake_token_around_image>", "<image>", "<global-img>")
    for size, mode in itertools.product((*SIZES, (57, 29), (3, 200), (200, 90)), ("RGB", "RGBA", "L")):
        content = picture(size, mode=mode)
        made = theirs(Image.open(io.BytesIO(content)), return_row_col_info=True, return_tensors="np")
        ours = tiles(open_image(content), of)
        assert ours.grid == (made["rows"][0][0], made["cols"][0][0]), size
        assert len(ours.pixels) == tiles_of(ours.grid)
        np.testing.assert_allclose(normalized(ours.pixels, of), made["pixel_values"][0], atol=1e-6)
        assert image_text(ours.grid, 5) == texts.get_image_prompt_string(*ours.grid, 5, *names)


_CONTENT = picture((64, 64))


@pytest.mark.parametrize(
    ("read", "wrong", "match"),
    [
        (image_bytes, "HTTP://127.0.0.1/admin", "nothing is fetched"),
        (image_bytes, "file:///etc/passwd", "nothing is fetched"),
        (image_bytes, None, "'NoneType'"),
        (image_bytes, "data:image/png,abc", "in base64"),
        (image_bytes, "data:image/png;base64,a?b", "not base64"),
        (image_bytes, "data:image/png;base64," + "A" * (files.IMAGE_BYTES * 4 // 3 + 9), "bytes, more than"),
        (open_image, b"GIF89a", "broken"),
        (open_image, _CONTENT[: len(_CONTENT) // 2], "is broken.*truncated"),
        (open_image, picture((64, 64), form="TIFF"), "none of JPEG, PNG"),
        (open_image, picture((1, 300)), "too narrow"),
        # Its head says so: nothing is decoded.
        (open_image, picture((3000, 3000)), r"3000 x 3000 pixels, more than 1,000,000"),
    ],
)  # fmt: skip
def test_images_that_cannot_be_read(monkeypatch, read, wrong, match):
    monkeypatch.setattr(files, "IMAGE_PIXELS", 1_000_000)
    with pytest.raises(ConfigError, match=match) as caught:
        read(wrong)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert image_bytes("data:image/png;base64," + base64.b64encode(_CONTENT).decode()) == _CONTENT


def test_an_image_takes_the_place_of_one_token():
    tokenizer = Tokenizer(image_tokenizer())
    messages = [{"role": "user", "content": [image_part(b"x"), {"type": "text", "text": "a <image> b"}]}]
    plain, contents = split_images(messages)
    assert contents == [b"x"]
    text = tokenizer.chat_text(plain)
    # What the message spells is no token.
    prompt = PromptTokens.of_ids(tokenizer.encode(text, add_special_tokens=False))
    image = EncodedImage((1, 2), np.zeros((6, 4), np.float32), image_id())
    whole, rows = with_images(tokenizer, prompt, [image])
    assert (whole.ids[rows.at] == image_id()).all()
    assert len(rows.at) == 6 == (whole.ids == image_id()).sum()
    expected = text.text.replace("<image>", image_text((1, 2), 2), 1)
    assert tokenizer.decode(whole.ids, skip_special_tokens=False) == expected
    for images in ([image] * 2, [EncodedImage((1, 2), np.zeros((6, 4), np.float32), 5)]):
        with pytest.raises(ConfigError, match="places for images"):
            with_images(tokenizer, prompt, images)
    with pytest.raises(ConfigError, match="a part of the type 'audio'"):
        split_images([{"role": "user", "content": [{"type": "audio"}]}])
    # A plain text is a list of one part for a template that knows lists alone.
    assert "User: hello<end" in tokenizer.render_chat([{"role": "user", "content": "hello"}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("torch")
    return save_smolvlm(tmp_path_factory.mktemp("smolvlm") / "m")


@pytest.fixture(scope="module")
def bundle(folder):
    prepare(folder, folder.parent / "m.jaxllm")
    return folder.parent / "m.jaxllm"


def test_a_chat_with_images_is_answered_as_by_transformers(folder, bundle, shipped_compilations):
    import torch

    from tests import tiny_hf

    of = read_image_input(Checkpoint(folder))
    contents = [picture(size, seed) for seed, size in enumerate(SIZES)]
    options = EngineOptions(context_tokens=256, chunk_tokens=(64,), prompt_embeddings=True, buckets_bytes=0)
    engine = Engine.open(bundle, options=options, warm_up=False)
    parts = [image_part(each) for each in contents]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
    # An answer of such a token would take a row of transformers.
    sampling = Sampling(logit_bias=((of.image_id, -1000.0),))
    config = GenerationConfig(max_tokens=6, ignore_eos=True, sampling=sampling)
    answer = engine.chat([message], config)
    engine.warm_up(prompt_tokens=answer.prompt_tokens, max_tokens=6)
    tokens = answer.result().tokens
    pixels = np.concatenate([normalized(tiles(open_image(each), of).pixels, of) for each in contents])
    prompt = [of.image_id if each >= engine.cfg.vocab_size else each for each in answer.request.prompt]
    model = tiny_hf.load(folder, wrapper=True)
    with torch.no_grad():
        theirs = model(
            torch.tensor([[*prompt, *tokens]]), pixel_values=torch.from_numpy(pixels[None]), use_cache=False
        ).logits[0]
    theirs[:, of.image_id] = -np.inf
    assert theirs[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    with pytest.raises(ContextOverflow, match=r"the images take \d+ tokens, the context holds 256"):
        engine.image_rows([of.image_id], contents * 20)
    engine.close()


def test_a_bundle_has_the_encoder_or_says_why_not(folder, bundle, tmp_path):
    with Bundle.open(bundle) as opened:
        facts = image_encoder_facts(opened)["image_encoder"]
    assert (facts["tile_pixels"], facts["rows_per_tile"]) == (TILE, 1)
    other = save_smolvlm(tmp_path / "m", processor={"max_image_size": {"longest_edge": 32}})
    with pytest.raises(CheckpointError, match="tiles of 32 pixels"):
        prepare(other, tmp_path / "a.jaxllm")
    (other / "preprocessor_config.json").unlink()
    prepare(other, tmp_path / "b.jaxllm")
    engine = Engine.open(tmp_path / "b.jaxllm", warm_up=False)
    with pytest.raises(ConfigError, match="has no encoder of images; send texts alone"):
        engine.chat([{"role": "user", "content": [image_part(picture())]}])
    engine.close()


# Rows in place of a prompt's tokens: what they answer, what a session knows of them, what is refused.


PROMPT = np.random.default_rng(0).integers(0, 256, 45).tolist()
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
# In the first, in both chunks of 16 and 32 tokens, and alone in the last.
AT = (0, 3, 15, 16, 17, 40)


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    with_rows = Engine.open(tiny_bundle, options=dataclasses.replace(OPTIONS, prompt_embeddings=True))
    yield with_rows
    with_rows.close()


def own_rows(at=AT, factor=1.0):
    """The embeddings of the prompt's own tokens."""
    table = np.asarray(tiny_params()["embed.tokens"], np.float32)
    return PromptEmbeddings(np.array(at), np.float32(factor) * table[[PROMPT[each] for each in at]])


def answer(engine, rows, session=None, prompt=None, config=CONFIG):
    other = [1 if at in AT else each for at, each in enumerate(PROMPT)] if prompt is None else prompt
    return engine.stream(other, config, rows=rows, session=session).result()


def test_rows_of_tokens_are_those_tokens(engine):
    plain = engine.stream(PROMPT, CONFIG).result()
    assert answer(engine, own_rows()).tokens == plain.tokens
    assert answer(engine, own_rows(factor=-3.0)).tokens != plain.tokens
    # Tokens that rows stand for are not of the answer's text: no penalty is for them.
    drawn = dataclasses.replace(CONFIG, sampling=Sampling(temperature=0.7, seed=3, repetition_penalty=1.2))
    assert len(answer(engine, own_rows(), config=drawn).tokens) == 12


def test_a_session_knows_rows_by_their_content(engine):
    session = Session()
    first = answer(engine, own_rows(), session)
    longer = [1 if at in AT else each for at, each in enumerate([*PROMPT, *first.tokens, 7, 8])]
    again = answer(engine, own_rows(), session, longer)
    assert again.reused_tokens == len(PROMPT) + len(first.tokens) - 1
    assert again.tokens == answer(engine, own_rows(), prompt=longer).tokens
    # Another row at the fourth place: three tokens are the same.
    other = own_rows()
    other.rows[1] *= 2
    assert answer(engine, other, session).reused_tokens == 3
    # Its rows are no tokens.
    assert engine.stream(PROMPT, CONFIG, session=session).result().reused_tokens == 0


def test_rows_and_requests_that_do_not_fit(engine, tiny_bundle):
    for at, rows, match in (
        ((0,), np.zeros((1, 63)), "63 numbers"),
        ((45,), np.zeros((1, 64)), "stands at 45"),
        ((1, 1), np.zeros((2, 64)), "ascending"),
        ((0.5,), np.zeros((1, 64)), "whole numbers"),
        ((0,), np.full((1, 64), np.nan), "not|NaN"),
        ((0, 1), np.zeros((1, 64)), r"\[1, 64\] at \[2\]"),
    ):
        with pytest.raises(ConfigError, match=match):
            answer(engine, PromptEmbeddings(np.array(at), rows))
    with pytest.raises(ConfigError, match="encode the prompt first"):
        engine.stream("hello", rows=own_rows((0,)))
    with pytest.raises(ConfigError, match="without `sliding`"):
        engine.stream(PROMPT, rows=own_rows(), sliding=Sliding(sink_tokens=2))
    plain = Engine.open(tiny_bundle, options=OPTIONS, warm_up=False)
    with pytest.raises(ConfigError, match=r"EngineOptions\(prompt_embeddings=True\)"):
        answer(plain, own_rows())
