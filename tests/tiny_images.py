"""A tiny SmolVLM: a random folder of transformers' with a tokenizer and a processor's files, and images."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jaxllm.checkpoints.tokenizer_folder import write_tokenizer
from jaxllm.text.tokenizer import TokenizerFiles
from tests import tiny_hf
from tests.tiny import tiny_tokenizer

# As SmolVLM's folder has it.
CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TILE = 28
# Two images that are cut, one that is not: their sizes, as (width, height).
SIZES = ((40, 30), (30, 100), (28, 28))
PROCESSOR = {
    "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True,
    "do_rescale": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "SmolVLMImageProcessor", "max_image_size": {"longest_edge": TILE}, "resample": 1,
    "rescale_factor": 1 / 255, "size": {"longest_edge": 2 * TILE},
}  # fmt: skip


def image_tokenizer() -> TokenizerFiles:
    """The tiny tokenizer with SmolVLM's tokens of images."""
    plain = tiny_tokenizer()
    library = Tokenizer.from_str(plain.tokenizer_json)
    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    library.add_special_tokens(
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places]
    )
    end = _id(library, "<end_of_utterance>")
    return TokenizerFiles(
        tokenizer_json=library.to_str(), chat_template=CHAT_TEMPLATE,
        special={**plain.special, "eos_token": "<end_of_utterance>"}, eos_ids=(end,), bos_id=plain.bos_id,
    )  # fmt: skip


def image_id() -> int:
    """The token `<image>`."""
    return _id(Tokenizer.from_str(image_tokenizer().tokenizer_json), "<image>")


def _id(library: Tokenizer, token: str) -> int:
    found = library.token_to_id(token)
    assert found is not None
    return found


def save_smolvlm(folder: Path, *, processor: dict[str, Any] | None = None) -> Path:
    """Makes a random SmolVLM and saves it with its tokenizer and processor."""
    family, keys = tiny_hf.WRAPPERS["smolvlm"]
    vocab, tokenizer = 320, image_tokenizer()
    keys = {
        **keys,
        "image_token_id": image_id(),
        "text_config": {**keys["text_config"], "vocab_size": vocab, "max_position_embeddings": 256},
    }
    tiny_hf.WRAPPERS["smolvlm"], before = (family, keys), tiny_hf.WRAPPERS["smolvlm"]
    try:
        tiny_hf.save_wrapper("smolvlm", folder)
    finally:
        tiny_hf.WRAPPERS["smolvlm"] = before
    write_tokenizer(folder, tokenizer)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor or PROCESSOR))
    return folder


def picture(
    size: tuple[int, int] = SIZES[0], seed: int = 0, *, form: str = "PNG", mode: str = "RGB"
) -> bytes:
    """A random image's file."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (4, 4, len(mode)), dtype=np.uint8)
    image = Image.fromarray(coarse.squeeze()).resize(size)
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()
