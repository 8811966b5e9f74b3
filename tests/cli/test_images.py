"""`--image` of `jaxllm generate` and `jaxllm chat`: what is answered, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig, Sampling
from jaxllm.models.encoder.image_input import IMAGE
from jaxllm.prepare import prepare
from jaxllm.serving.images.prompt import image_part
from tests.cli.outcome import Run, answer, failed
from tests.tiny_images import image_id, picture, save_smolvlm

CONFIG = GenerationConfig(max_tokens=4, ignore_eos=True, sampling=Sampling(temperature=0))
ASKED = ("-n", 4, "--ignore-eos", "--temperature", 0, "--draft", "none")


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle of a tiny SmolVLM, `m.jaxllm`, and two images."""
    pytest.importorskip("torch")
    home = tmp_path_factory.mktemp("smolvlm")
    prepare(save_smolvlm(home / "m"), home / "m.jaxllm")
    for seed in (0, 1):
        (home / f"{seed}.png").write_bytes(picture((28, 28), seed))
    return home


@pytest.fixture(scope="module")
def engine(smolvlm: Path) -> Engine:
    return Engine.open(smolvlm / "m.jaxllm", options=EngineOptions(prompt_rows=True), warm_up=False)


def test_generate_continues_after_images(run: Run, smolvlm: Path, engine: Engine) -> None:
    ask = ("generate", "-m", smolvlm / "m.jaxllm", *ASKED, "--json")
    first = ("--image", smolvlm / "0.png")
    got = answer(run(*ask, *first, "-p", "hello"))
    files = [(smolvlm / f"{seed}.png").read_bytes() for seed in (0, 1)]
    ids, rows = engine.image_rows(engine.tokenizer.encode(f"{IMAGE}hello"), files[:1])
    assert rows is not None
    assert len(rows.at) == ids.count(image_id()) > 0
    generation = engine.stream(ids, CONFIG, rows=rows)
    engine.warm_up(prompt_tokens=generation.prompt_tokens, max_tokens=4)
    assert got["text"] == generation.result().text
    assert got["prompt_tokens"] == len(ids)
    # In the order of their places, which a prompt may name.
    both = answer(run(*ask, *first, "--image", smolvlm / "1.png", "-p", f"a {IMAGE} b {IMAGE}"))
    ids, _ = engine.image_rows(engine.tokenizer.encode(f"a {IMAGE} b {IMAGE}"), files)
    assert both["prompt_tokens"] == len(ids)
    # It is the image that is read: its rows are others.
    _, other = engine.image_rows(engine.tokenizer.encode(f"{IMAGE}hello"), files[1:])
    assert other is not None
    assert np.abs(other.rows - rows.rows).max() > 0.01


def test_chat_begins_with_images(run: Run, smolvlm: Path, engine: Engine) -> None:
    typed = b"hi\nhello\n/reset\nhi\n"
    got = run("chat", "-m", smolvlm / "m.jaxllm", "--image", smolvlm / "0.png", *ASKED, stdin=typed)
    assert got.code == 0, got.err
    part, expected = image_part((smolvlm / "0.png").read_bytes()), []
    for conversation in (["hi", "hello"], ["hi"]):
        messages = []
        for turn, text in enumerate(conversation):
            content = [*([] if turn else [part]), {"type": "text", "text": text}]
            messages.append({"role": "user", "content": content})
            generation = engine.chat(messages, CONFIG)
            engine.warm_up(prompt_tokens=generation.prompt_tokens, max_tokens=4)
            expected.append(generation.result().text)
            messages.append({"role": "assistant", "content": expected[-1]})
    assert got.out == "".join(text + "\n" for text in expected)


def test_images_that_cannot_be_had(run: Run, smolvlm: Path, bundle: Path, tmp_path: Path) -> None:
    ask = ("generate", "-m", smolvlm / "m.jaxllm", "-p", "x", "--image")
    failed(run(*ask, tmp_path / "none.png"), "none.png: the image cannot be read", "check the path")
    (tmp_path / "text.png").write_text("no image")
    failed(run(*ask, tmp_path / "text.png"), "none of JPEG, PNG")
    failed(run(*ask, smolvlm / "0.png", "--image", smolvlm / "1.png", "-p", IMAGE), "2 images come with it")
    failed(run("generate", "-m", bundle, "-p", "x", "--image", smolvlm / "0.png"), "no encoder of images")
    program = run("generate", "--program", tmp_path, "-p", "x", "--image", smolvlm / "0.png")
    failed(program, "--image cannot be given with --program")
