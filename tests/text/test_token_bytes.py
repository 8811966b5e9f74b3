"""The bytes of tokens in a row are the text that they were made of."""

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from jaxllm.serving.ground.bundles import open_model
from jaxllm.text.token_bytes import TokenBytes
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from tests.text.test_tokenizer import TOKENIZER


def sentence_pieces() -> Tokenizer:
    """Words with a space before them, and single bytes for what has no word."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc", "▁a", "ab", "\ufffd"]
    library = tokenizers.Tokenizer(
        models.BPE(
            {word: at for at, word in enumerate(words)},
            [("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>"])
    return Tokenizer(TokenizerFiles(tokenizer_json=library.to_str()))


def packaged() -> Tokenizer:
    with open_model("default") as bundle:
        return Tokenizer(bundle.tokenizer_files())


MADE = {"bytes": TOKENIZER, "sentence pieces": sentence_pieces(), "packaged": packaged()}


@pytest.mark.parametrize("name", MADE)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
@example("🙂é日本🏳️‍🌈 a ab\ufffdc")
@settings(max_examples=60)
def test_bytes_in_a_row_are_the_text(name: str, text: str) -> None:
    tokenizer = MADE[name]
    ids = tokenizer.encode(text, add_special_tokens=False, special=False)
    found = TokenBytes(tokenizer)
    written = b"".join([*found.of(ids[:1], begins=True), *found.of(ids[1:])])
    assert written == tokenizer.decode(ids).encode()


def test_a_token_is_a_part_of_a_character_or_none_at_all() -> None:
    found = TokenBytes(MADE["sentence pieces"])
    assert found.of([2 + 0xE2, 1]) == [b"\xe2", b""]
    a = MADE["sentence pieces"].encode("a", add_special_tokens=False)
    assert (found.of(a), found.of(a, begins=True)) == ([b" a"], [b"a"])
    assert found.of(MADE["sentence pieces"].encode("\ufffd")[-1:]) == ["\ufffd".encode()]
