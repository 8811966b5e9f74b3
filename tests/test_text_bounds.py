"""Templates and tokenizers of unknown cost end within their bounds, and long texts are refused unread."""

import contextlib
import dataclasses
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from jaxllm.bundle import Bundle
from jaxllm.errors import ConfigError, ContextOverflow, JaxllmError, TemplateError
from jaxllm.serving.ground.bundles import find_model
from jaxllm.text import chat_template
from jaxllm.text import child_process as text_process
from jaxllm.text.chat_template import ChatTemplate, ConfinedTemplate
from jaxllm.text.child_process import TextProcess
from jaxllm.text.library_tokenizer import LibraryTokenizer
from jaxllm.text.marked_text import MarkedText
from jaxllm.text.template_program import TemplateProgram
from jaxllm.text.tokenizer import ConfinedTokenizer, Tokenizer, TokenizerFiles, open_tokenizer
from jaxllm.text.tokenizer_bounds import KNOWN_EXPRESSIONS, is_ordinary
from jaxllm.training.data.documents import ROLE_TEMPLATE
from tests.checkpoints import mutations
from tests.text.test_tokenizer import CHATML, FILES, GEMMA, LIBRARY, LLAMA3, MISTRAL, TOKENIZER, TOOLS
from tests.tiny import tiny_tokenizer

HI = [{"role": "user", "content": "hi"}]
MEMORY_BYTES = 1 << 29
needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux alone")


def rendered(source):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(HI, add_generation_prompt=True, now=None).text


@needs_limits
@pytest.mark.parametrize("name", mutations.TEMPLATES)
def test_no_template_takes_all_time_or_memory(name, monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_S", 1.0)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    text = ""
    with contextlib.suppress(TemplateError):
        text = rendered(mutations.TEMPLATES[name])
    assert len(text) < 1 << 26
    assert "root" not in text
    # What a whole machine's load adds is not its.
    assert time.monotonic() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_the_packaged_template_runs_here_and_no_other():
    with Bundle.open(find_model("draft")) as bundle:
        files = bundle.tokenizer_files()
    assert files.chat_template == ROLE_TEMPLATE
    assert isinstance(ChatTemplate(ROLE_TEMPLATE, files.special)._program, TemplateProgram)
    for other in (CHATML, GEMMA, LLAMA3, MISTRAL, TOOLS, f"{ROLE_TEMPLATE} "):
        assert isinstance(ChatTemplate(other, FILES.special)._program, ConfinedTemplate)


# Tokenizers.


def changed(**parts):
    return json.dumps({**json.loads(LIBRARY.to_str()), **parts})


@pytest.mark.slow
@needs_limits
@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": mutations.PARTS["pre_tokenizer"][5]},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a*)*$"}, "content": "b" * 1000}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}},
        {"normalizer": {"type": "Sequence", "normalizers": [mutations._replace({"String": "a"}, "aa")] * 34}},
        {"decoder": {"type": "Strip", "content": " ", "start": 10**9, "stop": 0}},
        {"post_processor": mutations._template([mutations._A] * 20000)},
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a" * n, -1.0] for n in range(1, 600)]}},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_bombs_are_errors(parts, monkeypatch):
    monkeypatch.setattr("jaxllm.text.tokenizer.LOAD_S", 5.0)
    monkeypatch.setattr("jaxllm.text.tokenizer.CALL_S", 2.0)
    text = changed(**parts)
    assert not is_ordinary(text)
    # One of them may be harmless to this text.
    with contextlib.suppress(JaxllmError):
        tokenizer = Tokenizer(TokenizerFiles(tokenizer_json=text))
        tokenizer.decode(tokenizer.encode("a" * 40 + "!")[:1000])
        tokenizer.decode([1, 2, 3])


@needs_limits
def test_a_bomb_does_not_take_the_next_text_with_it(monkeypatch):
    monkeypatch.setattr("jaxllm.text.tokenizer.CALL_S", 2.0)
    doubled = {"type": "Sequence", "normalizers": [mutations._replace({"String": "x"}, "xx")] * 40}
    confined = ConfinedTokenizer(changed(normalizer=doubled), (), {})
    harmless, bomb = MarkedText.of_template("abc"), MarkedText.of_template("x")
    expected = LIBRARY.encode("abc", add_special_tokens=False).ids
    assert confined.encode_marked(harmless, add_special_tokens=False).ids == expected
    first = confined._process._child
    assert first is not None
    with pytest.raises(ConfigError, match="tokenizer cannot read this text: it"):
        confined.encode_marked(bomb, add_special_tokens=False)
    assert confined.encode_marked(harmless, add_special_tokens=False).ids == expected
    assert confined._process._child is not first
    assert first.poll() is not None


def test_a_confined_tokenizer_gives_what_the_library_gives():
    text = changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [
        mutations._split("(b)(c)"), {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                     "use_regex": True}]})  # fmt: skip
    confined, here = open_tokenizer(text), LibraryTokenizer(text, (), {})
    assert isinstance(confined, ConfinedTokenizer)
    assert (confined.vocab_size, confined.spelled) == (here.vocab_size, here.spelled)
    assert confined.vocabulary() == here.vocabulary()
    assert confined.token_id("<s>") == here.token_id("<s>") == 256
    marked = MarkedText.of_template("<s>é 世") + MarkedText.of_content("<s>\n")
    for special in (True, False):
        encoded = confined.encode_marked(marked, add_special_tokens=special)
        assert encoded == here.encode_marked(marked, add_special_tokens=special)
        assert confined.decode(encoded.ids, skip_special_tokens=special) == here.decode(
            encoded.ids, skip_special_tokens=special
        )


def test_published_kinds_of_tokenizers_run_here():
    assert is_ordinary(FILES.tokenizer_json)
    assert is_ordinary(tiny_tokenizer().tokenizer_json)
    for expression in KNOWN_EXPRESSIONS:
        peer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        peer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
        peer.normalizer = normalizers.NFC()
        assert is_ordinary(peer.to_str())
        assert peer.encode("a b' 12\n\n x").ids
    data = Path(os.environ.get("JAXLLM_DATA", "none")) / "models"
    for path in data.glob("*/tokenizer.json"):
        assert is_ordinary(path.read_text(encoding="utf-8")), path


def test_no_mutation_of_a_tokenizer_is_uncaught(monkeypatch):
    monkeypatch.setattr("jaxllm.text.tokenizer.CALL_S", 2.0)
    source = json.loads(FILES.tokenizer_json)
    refused = 0
    # The random ones: the known ones are above, and take their time.
    known = sum(map(len, mutations.PARTS.values()))
    for _, text in itertools.islice(mutations.tokenizers(source, seed=0), known, known + 12):
        try:
            tokenizer = Tokenizer(TokenizerFiles(tokenizer_json=text))
            tokenizer.decode(tokenizer.encode("Once upon a time", special=False))
        except JaxllmError:
            refused += 1
    assert 0 < refused < 12


def test_a_panic_is_an_error():
    panic = type("PanicException", (BaseException,), {})
    tokenizer = LibraryTokenizer(FILES.tokenizer_json, (), {})

    class Panicking:
        def decode(self, *_, **__):
            raise panic("range end index 2 out of range\nfor slice")

    tokenizer._tokenizer = Panicking()  # pyright: ignore
    with pytest.raises(ConfigError, match="cannot write these tokens: range end index 2"):
        tokenizer.decode([1], skip_special_tokens=True)


# The child.


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
@pytest.mark.parametrize("busy", [False, True])
def test_a_child_dies_with_its_parent(busy):
    program = (
        "import sys, threading, time\n"
        "from jaxllm.text.child_process import TextProcess\n"
        "p = TextProcess(memory_bytes=1 << 29)\n"
        "ask = lambda source, limit_s=1: p.ask({'operation': 'render', 'source': source, 'variables': {},"
        " 'now': None}, limit_s=limit_s)\n"
        "ask('x', 60)\n"
        "print(p._child.pid, flush=True)\n"
        f"busy = {busy}\n"
        "loop = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'\n"
        "threading.Thread(target=ask, args=(loop,)).start() if busy else None\n"
        "time.sleep(0.2)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    child = Path("/proc") / run.stdout.strip()
    assert run.stdout.strip().isdigit(), run.stderr
    until = time.monotonic() + 30
    while child.exists() and "Z" not in (child / "stat").read_text().split(")")[1][:3]:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_forked_process_asks_a_child_of_its_own():
    process = TextProcess(memory_bytes=MEMORY_BYTES)
    request = {"operation": "render", "source": "x", "variables": {}, "now": None}
    assert process.ask(request, limit_s=10) == "x"
    mine, process._owner = process._child, -1
    assert process.ask(request, limit_s=10) == "x"
    assert process._child is not mine
    assert mine.poll() is None
    text_process._end(mine)


def test_an_interrupted_request_leaves_no_answer_for_the_next(monkeypatch):
    process = TextProcess(memory_bytes=MEMORY_BYTES)
    request = {"operation": "render", "source": "first", "variables": {}, "now": None}
    with monkeypatch.context() as patch:
        patch.setattr(text_process.json, "loads", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            process.ask(request, limit_s=10)
    assert process.ask({**request, "source": "second"}, limit_s=10) == "second"


# Length first.


def test_a_long_text_is_refused_before_it_is_read():
    limited = TOKENIZER.limited(100)
    began = time.perf_counter()
    with pytest.raises(ContextOverflow, match="16777216 characters; at most 6400 are read where 100 "):
        limited.encode("word " * ((1 << 24) // 5) + "x")
    assert time.perf_counter() - began < 1.0
    with pytest.raises(ContextOverflow, match="at most 6400"):
        Tokenizer(dataclasses.replace(FILES, chat_template=CHATML)).limited(100).encode_chat(
            [{"role": "user", "content": "x" * 10_000}]
        )


def test_of_a_text_that_is_too_long_only_the_beginning_is_read(monkeypatch):
    limited = TOKENIZER.limited(1000)
    read = []
    encode = limited._tokenizer.encode_marked
    monkeypatch.setattr(
        limited._tokenizer,
        "encode_marked",
        lambda text, **how: read.append(len(text.text)) or encode(text, **how),
    )
    with pytest.raises(ContextOverflow, match="the first 8000 are more than the 1000 tokens that fit"):
        limited.encode("a" * 60_000)
    assert read == [8000]
    assert len(limited.encode("a" * 1000, add_special_tokens=False)) == 1000
