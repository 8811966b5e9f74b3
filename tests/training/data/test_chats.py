"""Conversations and completions from JSON lines: which answers are learnt, and what a bad line says."""

import dataclasses
import json
import sys

import pytest
from rich.console import Console

from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.corpus import Corpus
from jaxllm.training.data.documents import read_chats
from jaxllm.training.data.encoders import ModelEncoder, PieceEncoder
from jaxllm.training.data.sources import Source, source_files
from jaxllm.training.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from tests.tiny import BEGIN_ID, END_ID, tiny_tokenizer

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
    assert (first.messages, first.answer) == (tuple(TALK[:1]), "hello")
    assert (second.messages, second.answer) == (tuple(TALK[:3]), "the end")
    assert first.digest() != second.digest()
    assert first.origin_digest() == second.origin_digest()
    # An answer of weight 0 is a message and not learnt.
    talk = messages(*TALK)
    talk[1]["weight"], talk[3]["weight"] = 0, 1
    completion = {"prompt": talk[:1], "completion": talk[1:]}
    first, second = read_chats(written(tmp_path / "a.jsonl", {"messages": talk}, completion))
    for document in (first, second):
        assert (document.messages, document.answer) == (tuple(TALK[:3]), "the end")


def test_keys_that_say_nothing_are_read(tmp_path, caplog):
    nothing = {"tool_calls": [], "reasoning_content": None, "name": "", "weight": None}
    talk = [{**each, **nothing} for each in messages(*TALK)]
    record = {"messages": talk, "tools": None, "weight": None, "prompt": "hi", "id": 3}
    path = written(tmp_path / "a.jsonl", record, record)
    assert len(list(read_chats(path))) == 4
    assert len(list(read_chats(path))) == 4
    # What has another meaning is said, once.
    said = [each.getMessage() for each in caplog.records if "tool" not in each.getMessage()]
    ignored = [f"the key {key!r} of its lines is ignored" for key in ("id", "prompt", "weight")]
    assert [each.split(": ")[1] for each in said] == ignored


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
    with pytest.raises(ConfigError, match="knows no tools"):
        ModelEncoder(Tokenizer(tiny_tokenizer())).encode([document])
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
    assert Source(chat="a.jsonl", prompt_weight=0.5).weights == (0.5, 1.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: a line must be an object"),
        ({"turns": []}, "line 2: an object needs messages, prompt and completion, or text"),
        ({"messages": []}, "line 2: messages must be a list of messages"),
        ({"messages": messages(("robot", "hi"))}, "line 2: a message needs a role"),
        ({"messages": messages(("user", "hi"))}, "line 2: a conversation needs a message of the assistant"),
        ({"prompt": "a"}, "line 2: a record needs text under 'completion'"),
        ({"prompt": "a", "completion": ""}, "line 2: completion is empty"),
        ({"messages": [{"role": "user", "content": None}]}, "line 2: a record needs text under 'content'"),
        (talk_with({"reasoning_content": "because"}), "line 2: reasoning_content of a message is not read"),
        (talk_with({"tool_calls": [{"id": "1"}]}), "line 2: tool_calls of a message is not read"),
        (talk_with({"anything": 0}), "line 2: anything of a message is not read"),
        (talk_with({"weight": 0.5}), "line 2: the weight of an assistant's message is 0 or 1, got 0.5"),
        (talk_with({"weight": 0}), "line 2: a conversation needs .* whose weight is not 0"),
        (talk_with({}, weight=0), "line 2: weight of an object would change what is learnt"),
        (talk_with({}, chat_template_kwargs={"a": 1}, system="s"), "line 2: chat_template_kwargs, system of"),
        (talk_with({}, tools="[]"), "line 2: tools must be a list of objects"),
        ({"prompt": "a", "completion": "b", "tools": [{}]}, "line 2: tools are of messages"),
    ],
)
def test_a_bad_line_is_named_with_its_number_or_left_out(tmp_path, line, message):
    good = [{"prompt": f"question {n}", "completion": "yes"} for n in range(4)]
    path = written(tmp_path / "a.jsonl", good[0], line, *good[1:])
    with pytest.raises(ConfigError, match=message):
        list(read_chats(path))
    with pytest.raises(ConfigError, match="--skip-bad"):
        Corpus.open([Source(chat=str(path))], None, 0.3)
    corpus = Corpus.open([Source(chat=str(path), skip_bad=True)], None, 0.3)
    assert len(corpus.digests) == 4
    console = Console(record=True, width=400)
    corpus.tell(console)
    assert f"left out 1 malformed lines, the first: {path}, {message[:15]}" in console.export_text()


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
    assert source_files(paths[0], (".txt",)) == paths[:1]
    with pytest.raises(ConfigError, match=r"holds no file that ends in \.txt"):
        source_files(tmp_path, (".txt",))
    with pytest.raises(ConfigError, match="no file fits the pattern"):
        source_files(tmp_path / "*.csv", (".jsonl",))
    corpus = Corpus.open([Source(chat="*.jsonl"), Source(chat="deep")], tmp_path, 0.3)
    assert len(corpus.digests) == 2
