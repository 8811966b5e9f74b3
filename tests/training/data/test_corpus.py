"""Documents and their split become tokens: which, on which side, in which files, local and remote."""

import dataclasses
import json
import sys

import fsspec
import jax
import numpy as np
import pytest
from jinja2 import Template

from jaxllm.cli.training_options import _PathOrUrl, given_sources
from jaxllm.config import RopeConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.quant import quantize
from jaxllm.tasks import readers
from jaxllm.tasks.example import TaskExample
from jaxllm.text.builtin_texts import builtin_texts
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from jaxllm.training.data import corpus, documents
from jaxllm.training.data.corpus import Corpus, TokenizedDocuments
from jaxllm.training.data.documents import (
    END_OF_TEXT,
    LEAST_SHARE,
    PAD,
    ROLE_TEMPLATE,
    SPECIAL_TOKENS,
    chat_document,
    held_out_digests,
    model_digest,
    read_chats,
    read_texts,
    shortened_document,
    text_document,
    with_fewer_words,
)
from jaxllm.training.data.encoders import MIN_VOCAB_SIZE, ModelEncoder, PieceEncoder, train_tokenizer
from jaxllm.training.data.sources import Source, source_files
from tests.tiny import BEGIN_ID, END_ID, TINY, tiny_tokenizer

TEXTS = [f"Cat {i} sat on mat {i}. Then it ran to house {i * 7}!" for i in range(40)]
REVIEWS = [{"text": f"film number {i}", "label": ("positive", "negative")[i % 2]} for i in range(30)]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "cats.txt").write_text("<|endoftext|>".join(TEXTS))
    (tmp_path / "tasks" / "sst2").mkdir(parents=True)
    (tmp_path / "tasks" / "sst2" / "train.jsonl").write_text("\n".join(map(json.dumps, REVIEWS)))
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, MIN_VOCAB_SIZE + 20)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return PieceEncoder(tokenizer)


def encode_document(document, tokenizer):
    ((ids, _),) = PieceEncoder(tokenizer).encode([document])
    return ids


SOURCES = Source(text="text/cats.txt"), Source(stories="text/cats.txt"), Source(task="sentiment")


def test_every_document_stands_on_one_side(data):
    opened = Corpus.open(SOURCES, data, 0.1)
    sides = {split: list(opened.documents(split)) for split in ("train", "held_out")}
    distinct = {side: {each.origin_digest() for _, each in documents} for side, documents in sides.items()}
    assert len(distinct["held_out"]) == 7
    assert len(distinct["train"]) + 7 == len(TEXTS) + len(REVIEWS)
    documents = sum(map(len, sides.values()))
    assert documents == 2 * len(TEXTS) + len(REVIEWS) == len(opened.digests)
    assert {number for number, _ in sides["train"]} == {0, 1, 2}
    told = next(document for number, document in sides["train"] if number == 1)
    assert told.texts[1].endswith(".")
    assert told.texts[2].startswith("Then")
    assert Corpus.open(SOURCES, data, 0.1).digest() == opened.digest()
    assert Corpus.open(SOURCES[:2], data, 0.1).digest() != opened.digest()
    # A story that is held out is not asked for in training either.
    for split in ("train", "held_out"):
        documents = list(Corpus.open(SOURCES[:2], data, 0.25).documents(split))
        plain = {document.texts[0] for source, document in documents if source == 0}
        told = {" ".join(document.texts[1:]) for source, document in documents if source == 1}
        assert plain == told
        assert plain


def test_tokens_lie_one_document_behind_the_other(data, tmp_path, tokenizer, encoder, monkeypatch):
    monkeypatch.setattr(corpus, "_ENCODE_DOCUMENTS", 7)
    opened = Corpus.open(SOURCES, data, 0.1)
    tokens = opened.tokenized(encoder, "train", tmp_path / "tokens")
    assert isinstance(tokens.tokens, np.memmap)
    assert tokens.tokens.dtype == np.uint16
    documents = list(opened.documents("train"))
    assert len(tokens) == len(documents)
    assert tokens.text_bytes == sum(len(text.encode()) for _, each in documents for text in each.texts)
    for number, (source, document) in enumerate(documents):
        ids = tokens.tokens[tokens.starts[number] : tokens.starts[number + 1]]
        assert ids.tolist() == encode_document(document, tokenizer)
        assert tokens.sources[number] == source
        answer = tokenizer.decode(ids[tokens.prompt_tokens[number] :].tolist(), skip_special_tokens=True)
        assert answer == (document.texts[0] if source == 0 else document.texts[-1])


def test_a_chat_is_encoded_as_its_template_reads(tokenizer):
    example = readers.SENTIMENT.example({"text": "so <|end|> bad", "label": "negative"})
    ids = encode_document(chat_document(example), tokenizer)
    prompt = Template(ROLE_TEMPLATE).render(messages=example.messages(), add_generation_prompt=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{prompt}negative<|end|>"
    # The text's own `<|end|>` is no end of a turn.
    assert ids.count(tokenizer.token_to_id("<|end|>")) == 3
    clean = readers.SENTIMENT.example({"text": "so bad", "label": "negative"})
    prompt = Template(ROLE_TEMPLATE).render(messages=clean.messages(), add_generation_prompt=True)
    expected = tokenizer.encode(f"{prompt}negative<|end|>").ids
    assert encode_document(chat_document(clean), tokenizer) == expected
    # A model reads documents through its own template.
    files = TokenizerFiles(
        tokenizer_json=tokenizer.to_str(), chat_template=ROLE_TEMPLATE, eos_ids=(0, 5),
        special={"eos_token": "<|endoftext|>"},
    )  # fmt: skip
    documents = [
        chat_document(readers.SENTIMENT.example({"text": "so bad", "label": "negative"})),
        chat_document(TaskExample(user="1 + 1 =", answer=" 2", form="text")),
        text_document("a cat"),
        # What a text says of special tokens is text, wherever it stands.
        text_document("a <|user|> said"),
        chat_document(TaskExample(user="1 <|end|><|assistant|>", answer="<|end|> 2")),
        chat_document(TaskExample(user="1 <|end|>", answer=" 2", form="text")),
    ]
    own, model = PieceEncoder(tokenizer).encode(documents), ModelEncoder(Tokenizer(files)).encode(documents)
    # With this template, the token that ends a turn is found though another comes first.
    assert model[0] == own[0]
    assert [ids[:-1] for ids, _ in model[1:]] == [ids[:-1] for ids, _ in own[1:]]
    assert [count for _, count in model] == [count for _, count in own]
    with pytest.raises(ConfigError, match="no end token"):
        ModelEncoder(Tokenizer(dataclasses.replace(files, eos_ids=())))


def test_token_files_are_written_once_and_never_stale(data, tmp_path, encoder, monkeypatch):
    opened = Corpus.open(SOURCES, data, 0.1)
    first = opened.tokenized(encoder, "train", tmp_path / "tokens")
    other = Corpus.open(SOURCES[:1], data, 0.1).tokenized(encoder, "train", tmp_path / "tokens")
    assert len(other) < len(first)
    monkeypatch.setattr(corpus, "write_tokens", None)
    again = opened.tokenized(encoder, "train", tmp_path / "tokens")
    np.testing.assert_array_equal(again.tokens, first.tokens)


def test_damaged_token_files_are_reported(tmp_path, encoder):
    for name in ("tokens.bin", "index.npz"):
        folder = tmp_path / name.removesuffix(".bin")
        corpus.write_tokens(folder, [(0, text_document(text)) for text in TEXTS], encoder)
        (folder / name).write_bytes((folder / name).read_bytes()[:-50])
        with pytest.raises(CheckpointError, match="made again"):
            TokenizedDocuments.read(folder)


def test_only_questions_trained_on_lose_words(data, encoder, tmp_path):
    whole, opened = (Corpus.open(SOURCES, data, 0.1, shortened_share=share) for share in (0.0, 1.0))
    assert opened.digest() == whole.digest()
    sides = [[list(each.documents(split)) for split in ("train", "held_out")] for each in (whole, opened)]
    assert sides[0][1] == sides[1][1]
    changed = {source for (source, was), (_, now) in zip(sides[0][0], sides[1][0], strict=True) if was != now}
    assert changed == {2}
    # Their files are not those of whole questions.
    lengths = [len(each.tokenized(encoder, "train", tmp_path).tokens) for each in (whole, opened)]
    assert lengths[1] < lengths[0]


@pytest.fixture
def store():
    files = fsspec.filesystem("memory")
    files.pipe("/corpus/a.txt", b"One text.\n\nAnother.\n")
    files.pipe("/corpus/deep/b.txt", "Third: \u4e2d<|endoftext|>Fourth.".encode())
    talk = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]}
    files.pipe("/corpus/talks.jsonl", json.dumps(talk).encode() + b"\n{broken\n")
    yield "memory://corpus"
    files.rm("/corpus", recursive=True)


def texts(*sources):
    return sorted(Corpus.open(sources, None, 0.5).training_texts()) + sorted(
        text for _, each in Corpus.open(sources, None, 0.5).documents("held_out") for text in each.texts
    )


def test_texts_and_conversations_at_a_url(store):
    for pattern in ("", "/**/*.txt"):
        found = sorted(texts(Source(text=store + pattern)))
        assert found == ["Another.", "Fourth.", "One text.", "Third: \u4e2d"]
    # Commands keep URLs as they are.
    paths = [_PathOrUrl().convert(each, None, None) for each in (f"{store}/a.txt", "local.txt")]
    remote, local = given_sources(paths, (), False)
    assert local.text.endswith("/local.txt")
    assert sorted(texts(remote)) == ["Another.", "One text."]
    both = Source(text=f"{store}/a.txt"), Source(chat=f"{store}/talks.jsonl", skip_bad=True)
    assert {"Hi?", "Yes."} < set(texts(*both))
    with pytest.raises(ConfigError, match=r"talks.jsonl, line 2: .*--skip-bad"):
        texts(Source(chat=f"{store}/talks.jsonl"))


def test_what_cannot_be_read_is_said(store, monkeypatch):
    for url, message in (
        (f"{store}/*.md", "no file at memory://corpus"),
        ("unknown://a", "cannot read unknown://a: Protocol not known"),
        ("relative.txt", "say with --data where"),
        ("/absent/none.txt", r"none\.txt"),
    ):
        with pytest.raises(ConfigError, match=message):
            texts(Source(text=url))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"cannot read memory://corpus: `pip install 'jaxllm\[data\]'`"):
        texts(Source(text=store))


# Documents, their digests and split, chats without their last answers, and the tokenizer.
BIRDS = [f"The {i}th cat saw {i * 37} birds, café №{i}." for i in range(60)]


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("a\nb\n<|endoftext|>\n c \n\nd<|endoftext|>\n", ["a\nb", "c \n\nd"]),
        ("a\nb\n\n  \nc\r\n \r\nd", ["a\nb", "c", "d"]),
        ("one\nwhole", ["one\nwhole"]),
        ("<|endoftext|>", []),
        (" \n\n", []),
    ],
)
@pytest.mark.parametrize("characters", [1 << 20, 5, 14])
def test_a_text_splits_at_its_marker_or_else_at_blank_lines(tmp_path, monkeypatch, text, texts, characters):
    # However few characters are read at once, no marker falls between two reads.
    monkeypatch.setattr(documents, "_READ_CHARACTERS", characters)
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    assert list(read_texts(path)) == texts


@pytest.mark.parametrize("text", ["aaaa\nbbbb\ncccc", "aaaaaaaaaaaaa<|endoftext|>b"])
def test_a_document_without_an_end_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARACTERS", 10)
    monkeypatch.setattr(documents, "_READ_CHARACTERS", 4)
    path = tmp_path / "text.txt"
    for content, message in (
        (text.encode(), "more than 10 characters"),
        (b"\xff\xfe", r"text\.txt as UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            list(read_texts(path))
    # Builtin texts need no file.
    assert sum(map(len, builtin_texts())) > 200_000


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_split_is_by_content_alone(share):
    digests = [text_document(text).digest() for text in BIRDS]
    held_out = held_out_digests(digests, share)
    assert 0 < len(held_out) < len(BIRDS)
    # Neither the order nor copies move a document to the other side.
    assert held_out_digests(digests[::-1] + digests, share) == held_out
    with pytest.raises(ConfigError, match="two distinct documents"):
        held_out_digests([b"same", b"same"], 0.5)


def test_tokenizer_is_deterministic_reversible_and_splits_digits():
    tokenizer = train_tokenizer(BIRDS, MIN_VOCAB_SIZE + 20)
    assert train_tokenizer(BIRDS, MIN_VOCAB_SIZE + 20).to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() == MIN_VOCAB_SIZE + 20
    assert (tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(PAD)) == (0, 1)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    for text in ("cat", " 12 cats\n\n", "鷗\x00🙂 ", "1999"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("1999").tokens == ["1", "9", "9", "9"]

    with pytest.raises(ConfigError, match=f"at least {MIN_VOCAB_SIZE}"):
        train_tokenizer(BIRDS, MIN_VOCAB_SIZE - 1)
    with pytest.raises(ConfigError, match="more text"):
        train_tokenizer(["ab"], 400)


UP = np.arange(32, dtype=np.float32).reshape(4, 8)
PARAMS = {"up": UP, "down": UP + 1}


def test_it_differs_where_models_do():
    half = dataclasses.replace(TINY, rope=RopeConfig(dim=8))
    others = [
        model_digest(TINY),
        model_digest(half, PARAMS),
        model_digest(TINY, {**PARAMS, "down": UP}),
        model_digest(TINY, {"up": UP + 1, "down": UP}),
        model_digest(TINY, PARAMS, {"up": UP}),
        model_digest({"model": TINY, "levels": (50, 100)}, PARAMS),
        model_digest(TINY, {**PARAMS, "up": quantize(UP, bits=8, axis=-1)}),
    ]
    once = model_digest(TINY, PARAMS)
    assert len({once, *others}) == 8
    # It is the same however a model is held.
    turned = {name: np.asfortranarray(PARAMS[name]) for name in sorted(PARAMS)}
    assert model_digest(dataclasses.replace(TINY), turned) == once
    assert model_digest(TINY, jax.tree.map(jax.numpy.asarray, PARAMS)) == once


def question(user: str) -> TaskExample:
    return TaskExample(user=user, answer=" yes", system="Is it so?", options=(" yes", " no"))


SOME = [question(f"the number {place} is one that nobody knows by heart yet") for place in range(200)]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_about_a_share_of_the_words_stays_in_order(share):
    kept = 0
    for example in SOME:
        words, left = example.user.split(), with_fewer_words(example, share).user.split()
        kept += len(left) / len(words)
        rest = iter(words)
        assert left
        assert all(word in rest for word in left)
        assert with_fewer_words(example, 1.0) == example
    assert abs(kept / 200 - share) < 0.05


def test_what_must_stay_does():
    user = "Screen: a red button and some text\nGoal: open the page of settings\nA) press it\nB) go back"
    left = with_fewer_words(question(user), 0.0).user
    assert left == "Screen:\nGoal: open the page of settings\nA) press it\nB) go back"


def test_the_asked_share_of_questions_is_shortened_the_same_each_time():
    documents = [chat_document(example) for example in SOME]
    heard = [shortened_document(each, 0.5) for each in documents]
    changed = [was != now for was, now in zip(documents, heard, strict=True)]
    assert 70 < sum(changed) < 130
    assert heard == [shortened_document(each, 0.5) for each in documents]
    free = chat_document(TaskExample(user="say this in a shorter way", answer=" shorter"))
    for whole, share in ((free, 1.0), (text_document("some text"), 1.0), (documents[0], 0.0)):
        assert shortened_document(whole, share) is whole
    lengths = [len(each.example.user.split()) for each, new in zip(heard, changed, strict=True) if new]
    whole = len(documents[0].example.user.split())
    assert min(lengths) < whole / 2 < max(lengths)
    assert sum(lengths) / len(lengths) > LEAST_SHARE * whole


# Conversations and completions from JSON lines: which answers are learnt, and what a bad line says.
TALK = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "the end")]


def messages(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def talk_with(keys, **of_record):
    """A conversation whose last answer has further keys."""
    talk = messages(*TALK[:2])
    return {"messages": [talk[0], {**talk[1], **keys}], **of_record}


def written(path, *records):
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records))
    return path


def test_a_conversation_is_a_document_for_each_learnt_answer(tmp_path):
    first, second = read_chats(written(tmp_path / "a.jsonl", {"messages": messages(*TALK), "id": 3}, ""))
    assert [each[:2] for each in first.messages] == TALK[:2]
    assert [each[:2] for each in second.messages] == TALK
    assert first.origin_digest() == second.origin_digest()
    # An answer of weight 0 is a message and not learnt.
    talk = messages(*TALK)
    talk[1]["weight"], talk[3]["weight"] = 0, 1
    completion = {"prompt": talk[:1], "completion": talk[1:]}
    first, second = read_chats(written(tmp_path / "a.jsonl", {"messages": talk}, completion))
    for document in (first, second):
        assert [each[:2] for each in document.messages] == TALK


def test_keys_that_say_nothing_are_read(tmp_path, caplog):
    nothing = {"tool_calls": [], "reasoning_content": None, "name": "", "weight": None}
    talk = [{**each, **nothing} for each in messages(*TALK)]
    record = {"messages": talk, "tools": None, "weight": None, "prompt": "hi", "id": 3}
    path = written(tmp_path / "a.jsonl", record, record)
    for _ in range(2):
        assert len(list(read_chats(path))) == 4
    # What has another meaning is said, once.
    for key in ("id", "prompt"):
        assert caplog.text.count(f"the key {key!r} of its lines is ignored") == 1


def test_tools_are_for_the_template(tmp_path):
    template = "{{ tools }}{% for m in messages %}{{ m.content }}|{% endfor %}"
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    path = written(tmp_path / "a.jsonl", {"messages": messages(*TALK[:2]), "tools": tools})
    (document,) = read_chats(path)
    (plain,) = read_chats(written(tmp_path / "b.jsonl", {"messages": messages(*TALK[:2])}))
    assert document.digest() != plain.digest()
    tokenizer = Tokenizer(dataclasses.replace(tiny_tokenizer(), chat_template=template))
    ((ids, prompt),) = ModelEncoder(tokenizer).encode([document])
    expected = tokenizer.encode_chat([{"role": "user", "content": "hi"}], tools=tools)
    assert ids[:prompt] == expected
    assert len(expected) > len(tokenizer.encode_chat([{"role": "user", "content": "hi"}]))
    # A template without tools: in the generic form, as a service has it.
    plain_tokenizer = Tokenizer(tiny_tokenizer())
    ((ids, _),) = ModelEncoder(plain_tokenizer).encode([document])
    assert '"name": "find"' in plain_tokenizer.decode(ids)
    with pytest.raises(ConfigError, match="no place for the tools"):
        PieceEncoder(train_tokenizer(["hi hello"], MIN_VOCAB_SIZE)).encode([document])


def test_only_answers_are_learnt(tmp_path):
    path = written(
        tmp_path / "a.jsonl",
        {"messages": messages(*TALK)},
        {"prompt": "once", "completion": " upon"},
        {"prompt": messages(("user", "hi")), "completion": messages(("assistant", "hello"))},
        {"text": "plain"},
    )
    tokenizer = Tokenizer(tiny_tokenizer())
    found = ModelEncoder(tokenizer).encode(list(read_chats(path)))

    def plain(text):
        return tokenizer.encode(text, add_special_tokens=False)

    def parts(place):
        ids, prompt = found[place]
        return ids[:prompt], ids[prompt:]

    chat = plain("<|begin|><|user|>hi<|assistant|>")
    assert chat[0] == BEGIN_ID
    assert parts(0) == (chat, [*plain("hello"), END_ID])
    longer = plain("<|begin|><|user|>hi<|assistant|>hello<|user|>bye<|assistant|>")
    assert parts(1) == (longer, [*plain("the end"), END_ID])
    assert parts(2) == ([BEGIN_ID, *plain("once")], [*plain(" upon"), END_ID])
    assert parts(3) == parts(0)
    assert parts(4)[0] == []
    assert Source(chat="a.jsonl").weights == (0.0, 1.0)
    assert Source(text="a.txt").weights == (1.0, 1.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ({"turns": []}, "line 2: an object needs messages, prompt and completion, or text"),
        ({"messages": messages(("robot", "hi"))}, "line 2: a message needs a role"),
        ({"messages": messages(("user", "hi"))}, "line 2: a conversation needs a message of the assistant"),
        ({"prompt": "a", "completion": ""}, "line 2: completion is empty"),
        (talk_with({"function_call": {"name": "f"}}), "line 2: function_call of a message is not read"),
        (talk_with({"tool_calls": [{"id": "1"}]}), "line 2: tool_calls are a list of"),
        (talk_with({"weight": 0.5}), "line 2: the weight of an assistant's message is 0 or 1, got 0.5"),
        (talk_with({}, weight=0), "line 2: weight of an object would change what is learnt"),
        (talk_with({}, tools="[]"), "line 2: tools must be a list of objects"),
    ],
)
def test_a_bad_line_is_named_with_its_number_or_left_out(tmp_path, line, message):
    good = [{"prompt": f"question {n}", "completion": "yes"} for n in range(4)]
    path = written(tmp_path / "a.jsonl", good[0], line, *good[1:])
    with pytest.raises(ConfigError, match=message):
        list(read_chats(path))
    with pytest.raises(ConfigError, match="--skip-bad"):
        Corpus.open([Source(chat=str(path))], None, 0.3)
    opened = Corpus.open([Source(chat=str(path), skip_bad=True)], None, 0.3)
    assert len(opened.digests) == 4
    assert opened.bad_lines[0].startswith(f"{path}, {message[:15]}")


def test_rows_of_parquet_are_read_as_lines_are(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    records = [{"messages": messages(*TALK)}, {"prompt": "once", "completion": " upon"}, {"text": "plain"}]
    folder = tmp_path / "data"
    folder.mkdir()

    def write(name, rows):
        parquet.write_table(arrow.Table.from_pylist(rows), folder / name)
        return folder / name

    # Of a table all rows have all columns.
    columns = {"messages": None, "prompt": None, "completion": None, "text": None}
    path = write("a.parquet", [columns | each for each in records])
    lines = list(read_chats(written(tmp_path / "a.jsonl", *records)))
    assert [each.digest() for each in read_chats(path)] == [each.digest() for each in lines]
    assert len(Corpus.open([Source(chat="data")], tmp_path, 0.3).digests) == 4
    broken = write("b.parquet", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}])
    with pytest.raises(ConfigError, match=r"b\.parquet, row 2: completion is empty; mend the row"):
        list(read_chats(broken))
    (folder / "c.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"cannot read the file .*c\.parquet as parquet"):
        list(read_chats(folder / "c.parquet"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"a\.parquet: `pip install 'jaxllm\[data\]'`"):
        list(read_chats(tmp_path / "a.parquet"))


def test_folders_and_patterns_name_files(tmp_path):
    (tmp_path / "deep").mkdir()
    record = {"prompt": "once", "completion": " upon"}
    paths = [written(tmp_path / name, record | {"prompt": name}) for name in ("b.jsonl", "deep/a.jsonl")]
    written(tmp_path / "notes.md", "nothing")
    assert source_files(tmp_path, (".jsonl",)) == sorted(paths)
    assert source_files(tmp_path / "*.jsonl", (".jsonl",)) == paths[:1]
    with pytest.raises(ConfigError, match=r"holds no file that ends in \.txt"):
        source_files(tmp_path, (".txt",))
    with pytest.raises(ConfigError, match="no file fits the pattern"):
        source_files(tmp_path / "*.csv", (".jsonl",))
    assert len(Corpus.open([Source(chat="*.jsonl"), Source(chat="deep")], tmp_path, 0.3).digests) == 2
