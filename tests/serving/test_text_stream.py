"""Laws of streamed text, over tokenizers of every family that checkpoints use."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxllm.errors import ConfigError
from jaxllm.serving.ground.text_stream import Detokenizer, TextStream
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

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
@settings(max_examples=60)
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
@settings(max_examples=40)
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
@settings(max_examples=60)
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
def test_runs_of_invalid_bytes_flow_and_genuine_replacement_characters_stay(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for run in (b"\x80", b"\xc3", b"\xf0\x9f\x98", b"\xe4\xb8"):
        detokenizer, waited = Detokenizer(tokenizer), 0
        # At most three tokens wait, and the next answer is not disturbed.
        for token in byte_ids(tokenizer, name, run * 60):
            waited = 0 if detokenizer.push([token]) else waited + 1
            assert waited <= 3
        detokenizer.flush()
        assert detokenizer.push(byte_ids(tokenizer, name, b"x")) == "x"
    for count in range(1, 12):
        # The text's own U+FFFD, spelled in bytes, is not taken for broken ones.
        text = "é" + "\ufffd" * count + "é"
        ids = byte_ids(tokenizer, name, text.encode())
        assert "".join(stream(tokenizer, ids, [1])) == tokenizer.decode(ids) == text
    if name == "byte-fallback":
        # A byte-fallback decoder gives up a whole run; the stream recovers inside it.
        ids = byte_ids(tokenizer, name, b"\x80" + "世".encode() * 60)
        assert "".join(stream(tokenizer, ids, [1])).endswith("世世世")
        assert "世" not in tokenizer.decode(ids)


def byte_ids(tokenizer: Tokenizer, name: str, data: bytes) -> list[int]:
    """The ids of single-byte tokens."""
    if name != "bytes":
        return [3 + byte for byte in data]
    raw = tokenizers.Tokenizer.from_str(tokenizer.files.tokenizer_json)
    # The byte-level alphabet maps a byte to a printable character.
    by_byte = {gpt2_byte(letter): raw.token_to_id(letter) for letter in pre_tokenizers.ByteLevel.alphabet()}
    return [by_byte[byte] for byte in data]


def gpt2_byte(letter: str) -> int:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    code = ord(letter)
    return code if code < 256 else shifted[code - 256]


class CountingDecoder:
    """Counts the ids that are decoded: the cost of streaming."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.decoded_tokens = tokenizer, 0

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


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4))
@settings(max_examples=20)
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


def test_a_stop_may_come_with_the_flush_and_what_was_held_back_for_one_too() -> None:
    tokenizer = TOKENIZERS["bytes"]
    text = TextStream(tokenizer, ["\ufffd"])
    assert text.push(tokenizer.encode("aé")[:2]) == "a"
    assert not text.stopped
    assert (text.flush(), text.matched) == ("", "\ufffd")
    tokenizer = TOKENIZERS["byte-level"]
    text, ids = TextStream(tokenizer, ["dog!"]), tokenizer.encode("lazy do")
    assert (text.push(ids), text.flush()) == ("lazy ", "do")
    assert (text.stopped, text.consumed_tokens) == (False, len(ids))


# Stop strings in streamed text, against a plain search.


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What `TextStream` shows of `text`, one character at a time: slow and plain."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 12)),
)
@settings(max_examples=150)
def test_stops_match_the_plain_search(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = TextStream(TOKENIZERS["bytes"], stops)
    expected, matched = first_stop(text, stops)
    shown = ""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        shown += matcher.push_text(text[start:end])
        # Never more than what every continuation would show.
        assert expected.startswith(shown)
        if not matcher.stopped:
            # Nor less: what is withheld may still begin a stop string.
            withheld = text[len(shown) : end]
            assert withheld == "" or any(stop.startswith(withheld) and stop != withheld for stop in stops)
    shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, matched)


def test_bad_stops_are_refused() -> None:
    many: list[Any] = [[""], ["a" * 257], [5], ["a"] * 17, "abc"]
    for stops, message in zip(
        many, ("1 to 256", "1 to 256", "got 5", "got 17", "must be a list"), strict=True
    ):
        with pytest.raises(ConfigError, match=message):
            TextStream(TOKENIZERS["bytes"], stops)
