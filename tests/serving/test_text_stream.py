"""Laws of streamed text, over tokenizers of every family that checkpoints use."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxllm.serving.ground.text_stream import Detokenizer, TextStream
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

DATA = Path(os.environ.get("JAXLLM_DATA", Path(__file__).parents[2] / "../shared/data"))

TRAINING_TEXT = [
    "The quick brown fox  jumps over the lazy dog.\n",
    "naïve café, Straße, žluťoučký kůň — “quoted” …\n",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם\n",
    "你好，世界。こんにちは世界。안녕하세요\n",
    "😀😃😄 👩‍👩‍👧 🇫🇷 e\u0301 \U0001f9d1\U0001f3fd\n",
] * 4


def byte_level(merges: int) -> tokenizers.Tokenizer:
    """GPT-2, Llama 3, Qwen: merges may join the end of one character with the start of the next."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257 + merges,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


def byte_fallback(*, strip: bool) -> tokenizers.Tokenizer:
    """Llama 2, Mistral (a leading space is added and stripped again) and Gemma (it is not)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "\ufffd", *"abcdehlortwxyz.,!?", "é", "世", "😀"]
    merges = [("▁", "h"), ("h", "e"), ("l", "l"), ("o", "▁"), ("▁", "▁"), ("▁h", "e"), ("he", "ll")]
    pieces += ["".join(merge) for merge in merges]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if strip else [])
    )
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """T5 and other Unigram models: words begin with a mark, the first mark is no space."""
    characters = sorted(set("".join(TRAINING_TEXT)) - {" ", "\n"})
    vocabulary = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("▁▁", -2.5)]
    vocabulary += [(character, -4.0) for character in characters]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wrap(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(TokenizerFiles(tokenizer_json=tokenizer.to_str()))


TOKENIZERS = {
    "bytes": wrap(byte_level(0)),
    "byte-level": wrap(byte_level(200)),
    "byte-fallback": wrap(byte_fallback(strip=False)),
    "byte-fallback-strip": wrap(byte_fallback(strip=True)),
    "metaspace": wrap(metaspace()),
}
EXACT_FOR_BYTES = ["bytes", "byte-level"]

every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
alphabets = st.sampled_from(["ab é", " \n", "é世😀👩\u200d👧", "\ufffda ", "世界你好", "hello the ▁"])
texts = st.one_of(
    alphabets.flatmap(lambda alphabet: st.text(alphabet, max_size=40)),
    st.text(max_size=40),
    st.lists(st.sampled_from("".join(TRAINING_TEXT).split(" "))).map(" ".join),
)


def stream(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """The pieces for `ids` pushed in groups of `sizes`, cycling, and the flush."""
    detokenizer, pieces, start, turn = Detokenizer(tokenizer), [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, detokenizer.flush()]


@every_tokenizer
@given(text=texts, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_pieces_make_the_whole(name: str, text: str, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    pieces = stream(tokenizer, ids, sizes)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@every_tokenizer
@given(data=st.data(), text=texts)
@settings(max_examples=40, deadline=None)
def test_special_tokens_are_passed_over(name: str, data: st.DataObject, text: str) -> None:
    """They neither show nor cost the next word its space, wherever they stand."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    for _ in range(data.draw(st.integers(1, 40))):
        # 0 is special in each tokenizer, and 10^6 is a padding row of the model.
        special = data.draw(st.sampled_from([0, 10**6]))
        ids.insert(data.draw(st.integers(0, len(ids))), special)
    assert "".join(stream(tokenizer, ids, [1])) == tokenizer.decode(ids)


@every_tokenizer
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_ids_never_stall(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(1, tokenizer.vocab_size - 1), max_size=80))
    detokenizer, shown = Detokenizer(tokenizer), ""
    for count, token in enumerate(ids, start=1):
        shown += detokenizer.push([token])
        if name in EXACT_FOR_BYTES:
            assert len(shown) >= len(tokenizer.decode(ids[: max(0, count - 3)]))
    shown += detokenizer.flush()
    if name in EXACT_FOR_BYTES:
        # A byte-level decoder treats each invalid byte by itself, so even these are exact.
        assert shown == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["bytes", "byte-fallback", "byte-fallback-strip"])
@pytest.mark.parametrize("run", [b"\x80", b"\xc3", b"\xf0\x9f\x98", b"\xe4\xb8"])
def test_a_run_of_invalid_bytes_flows(name: str, run: bytes) -> None:
    """At most three tokens wait, and the next answer is not disturbed."""
    tokenizer = TOKENIZERS[name]
    ids = byte_ids(tokenizer, name, run * 60)
    detokenizer = Detokenizer(tokenizer)
    waited = 0
    for token in ids:
        waited = 0 if detokenizer.push([token]) else waited + 1
        assert waited <= 3
    detokenizer.flush()
    assert detokenizer.push(byte_ids(tokenizer, name, b"x")) == "x"


def byte_ids(tokenizer: Tokenizer, name: str, data: bytes) -> list[int]:
    """The ids of single-byte tokens."""
    if name == "bytes":
        raw = tokenizers.Tokenizer.from_str(tokenizer.files.tokenizer_json)
        # The byte-level alphabet maps a byte to a printable character.
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        by_byte = {}
        for letter in letters:
            token = raw.token_to_id(letter)
            assert token is not None
            by_byte[gpt2_byte(letter)] = token
        return [by_byte[byte] for byte in data]
    return [3 + byte for byte in data]


def gpt2_byte(letter: str) -> int:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    code = ord(letter)
    return code if code < 256 else shifted[code - 256]


def test_text_after_invalid_bytes_is_shown_again() -> None:
    """A byte-fallback decoder gives up a whole run; the stream recovers inside it."""
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = byte_ids(tokenizer, "byte-fallback", b"\x80" + "世".encode() * 60)
    pieces = stream(tokenizer, ids, [1])
    assert "".join(pieces).endswith("世世世")
    assert "世" not in tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["bytes", "byte-fallback", "byte-fallback-strip"])
@pytest.mark.parametrize("count", range(1, 12))
def test_genuine_replacement_characters(name: str, count: int) -> None:
    """The text's own U+FFFD, spelled in bytes, is not taken for broken ones."""
    text = "é" + "\ufffd" * count + "é"
    tokenizer = TOKENIZERS[name]
    ids = byte_ids(tokenizer, name, text.encode())
    assert "".join(stream(tokenizer, ids, [1])) == tokenizer.decode(ids) == text


def test_characters_are_whole() -> None:
    tokenizer = TOKENIZERS["bytes"]
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a😀é")
    assert [detokenizer.push([token]) for token in ids] == ["a", "", "", "", "😀", "", "é"]
    assert detokenizer.flush() == ""


def test_half_a_character_at_the_end_comes_out_replaced() -> None:
    tokenizer = TOKENIZERS["bytes"]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("a😀")[:3]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_tokens_that_straddle_characters_flow() -> None:
    """Each token ends one character and begins the next: no boundary between two tokens is clean."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    by_byte = {gpt2_byte(letter): letter for letter in letters}
    head, middle = by_byte[0xE4], by_byte[0xB8] + by_byte[0xAD]
    vocabulary = {piece: index for index, piece in enumerate([*sorted(letters), middle, middle + head])}
    raw = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    raw.decoder = decoders.ByteLevel()
    tokenizer = wrap(raw)
    ids = [vocabulary[head]] + [vocabulary[middle + head]] * 99 + [vocabulary[middle]]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in ids]
    assert pieces == [""] + ["中"] * 100


def test_spaces_are_neither_lost_nor_doubled() -> None:
    tokenizer = TOKENIZERS["byte-fallback-strip"]
    text = "hello  hello   hello"
    pieces = stream(tokenizer, tokenizer.encode(text), [1])
    assert "".join(pieces) == text
    assert "".join(stream(tokenizer, tokenizer.encode("  hello"), [1])) == "  hello"


class CountingDecoder:
    """Counts the ids that are decoded: the cost of streaming."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoded_tokens = 0

    def decode(self, ids: Sequence[int], /) -> str:
        self.decoded_tokens += len(ids)
        return self.tokenizer.decode(ids)


@every_tokenizer
@pytest.mark.parametrize("kind", ["text", "invalid", "special"])
def test_the_cost_of_a_token_is_constant(name: str, kind: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = {"text": tokenizer.encode("hello the 世 " * 200), "invalid": [130] * 2000, "special": [0] * 2000}
    counting = CountingDecoder(tokenizer)
    detokenizer = Detokenizer(counting)
    for token in (ids[kind] * 10)[:2000]:
        detokenizer.push([token])
    assert counting.decoded_tokens <= 40 * 2000


@pytest.mark.parametrize("prompt", ["Once upon a time, 世界 😀 é!", "\n\n  a  b"])
def test_stories260k(prompt: str) -> None:
    path = DATA / "models/stories260K/tokenizer.json"
    if not path.exists():
        pytest.skip(f"no {path}; set JAXLLM_DATA")
    tokenizer = Tokenizer(TokenizerFiles(tokenizer_json=path.read_text(encoding="utf-8")))
    ids = tokenizer.encode(prompt)
    assert "".join(stream(tokenizer, ids, [1])) == tokenizer.decode(ids) == prompt


# With stop strings.


@every_tokenizer
def test_a_stream_without_stops_is_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the 世 the")
    text = TextStream(tokenizer)
    assert text.push(ids) + text.flush() == tokenizer.decode(ids)
    assert not text.stopped
    assert text.consumed_tokens == len(ids)


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_a_stream_says_which_token_stopped_it(sizes: list[int]) -> None:
    tokenizer = TOKENIZERS["bytes"]
    text = TextStream(tokenizer, ["世!"])
    ids = tokenizer.encode("hello 世, 世! bye")
    shown, start = "", 0
    for turn in range(len(ids)):
        size = sizes[turn % len(sizes)]
        shown += text.push(ids[start : start + size])
        start += size
        assert "hello 世, ".startswith(shown)
    assert text.stopped
    assert text.matched == "世!"
    assert shown + text.flush() == "hello 世, "
    assert tokenizer.decode(ids[: text.consumed_tokens]) == "hello 世, 世!"


def test_a_stop_may_come_with_the_flush() -> None:
    tokenizer = TOKENIZERS["bytes"]
    text = TextStream(tokenizer, ["\ufffd"])
    assert text.push(tokenizer.encode("aé")[:2]) == "a"
    assert not text.stopped
    assert text.flush() == ""
    assert text.matched == "\ufffd"


def test_what_was_held_back_for_a_stop_is_flushed() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text = TextStream(tokenizer, ["dog!"])
    assert text.push(tokenizer.encode("lazy do")) == "lazy "
    assert text.flush() == "do"
