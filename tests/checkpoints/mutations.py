"""Damaged and hostile files of a Hugging Face folder, without end: tokenizers, chat templates, folders.

Each generator first gives every case that is known to have been trouble, then random ones by its seed, so
that a short run sees the first and a long run more and more. Nothing here says what must come of a case: a
reader either takes it or raises a `JaxllmError`, in bounded time and memory.
"""

import contextlib
import copy
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

JUNK: tuple[Any, ...] = (
    None, 0, -1, 1, 3, 1 << 24, 1 << 31, 1 << 40, 1 << 62, 10**20, 10**400, 0.5, 1e308, -1e308, 1e-300,
    float("nan"), float("inf"), "", "x", "\0", "\ud800", "../x", "(a+)+$", "[", "▁▁▁", "é" * 5,
    [], [0], [[]], {}, {"a": 0}, True, False,
)  # fmt: skip


def _split(expression: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": behavior, "invert": invert}


def _replace(old: dict[str, str], new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": old, "content": new}


def _template(single: list[Any], special: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special or {}}


_A = {"Sequence": {"id": "A", "type_id": 0}}
# By part of a tokenizer.json, what each of them may become.
PARTS: dict[str, tuple[Any, ...]] = {
    "normalizer": (
        None,
        {"type": "NFKC"},
        {"type": "Lowercase"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Prepend", "prepend": "▁" * 10},
        _replace({"Regex": "(a*)*$"}, "b" * 1000),
        _replace({"String": ""}, "x"),
        {"type": "Sequence", "normalizers": [_replace({"String": "a"}, "aa")] * 34},
        {"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 5000},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="},
        {"type": "ByteLevel"},
    ),
    "pre_tokenizer": (
        None,
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        *(
            {"type": "Metaspace", "replacement": each, "prepend_scheme": "first", "split": True}
            for each in ("▁", "ab", "")
        ),
        _split("(?:(?:a+)+)+$"),
        _split("(a|aa)+b"),
        _split("(?:(?:o+)+)+x"),
        _split("(?=((.*)*)*)", "Removed", True),
        _split("", "MergedWithNext", True),
        _split("(((a{1000}){1000}){1000})"),
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        {"type": "Digits", "individual_digits": True},
        {"type": "UnicodeScripts"},
        {"type": "FixedLength", "length": 0},
    ),
    "decoder": (
        None,
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 10**9, "stop": 0},
        {"type": "Strip", "content": "a", "start": 0, "stop": 1 << 40},
        _replace({"String": ""}, "y"),
        _replace({"Regex": "(x+x+)+y"}, "y"),
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "BPEDecoder", "suffix": ""},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 5}]},
    ),
    "post_processor": (
        None,
        _template([{"SpecialToken": {"id": "nope", "type_id": 0}}]),
        _template([_A] * 20000),
        _template([{"Sequence": {"id": "B", "type_id": 0}}]),
        _template(
            [{"SpecialToken": {"id": "x", "type_id": 0}}, _A],
            {"x": {"id": "x", "ids": [4294967295, 1], "tokens": ["a", "b"]}},
        ),
        {"type": "BertProcessing", "sep": ["s", 2**32 - 1], "cls": ["c", 1]},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ),
    "model": (
        {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False},
        {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]},
        {"type": "Unigram", "unk_id": 5, "vocab": [["a", -1.0]]},
        {"type": "Unigram", "unk_id": 0, "vocab": []},
        {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0], ["a", -1e308]]},
        {"type": "WordLevel", "vocab": {"a": 4294967295, "<unk>": 1}, "unk_token": "<unk>"},
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
        {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
         "max_input_chars_per_word": 100},
        {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]},
        {"type": "BPE", "vocab": {}, "merges": [], "unk_token": "q"},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "zz", "fuse_unk": True},
        {"type": "BPE", "vocab": {"a": 0, "b": 0, "ab": 0}, "merges": [["a", "b"]], "dropout": 0.5},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 7.0},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "cache_capacity": 0,
         "continuing_subword_prefix": "####", "end_of_word_suffix": "é"},
    ),
}  # fmt: skip

# Templates that would take all time or memory, or reach where they may not.
TEMPLATES: dict[str, str] = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "long text": "{{ 'a' * 10**11 }}",
    "long list": "{{ ([0] * 10**10)|length }}",
    "power": "{{ 7 ** 10 ** 9 }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:>2000000000}'.format(1)|length }}",
    "center": "{{ 'a'|center(2000000000)|length }}",
    "indent": "{{ ('\n' * 1000000)|indent(100000)|length }}",
    "join": "{{ (range(99999)|list * 1000)|join('xxxxxxxxxx')|length }}",
    "slice": "{{ range(10)|slice(10**8)|list|length }}",
    "batch": "{{ range(10)|batch(10**9, 'x')|list|length }}",
    "replace": "{{ ('a' * 100000)|replace('a', 'b' * 100000)|length }}",
    "words": "{{ lipsum(n=100000)|length }}",
    "JSON": "{{ messages|tojson(indent=1000000000) }}",
    "doubling": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "doubling lists": "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "macro": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "long source": "{{ 1 }}" * 300000,
    "all messages for each": "{% for a in messages %}{% for b in messages %}{% for c in messages %}"
    "{{ messages }}{% endfor %}{% endfor %}{% endfor %}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "frame": "{{ (messages|map('length')).gi_frame.f_back.f_globals }}",
    "include": "{% include '/etc/passwd' %}",
}


def tokenizers(source: dict[str, Any], seed: int) -> Iterator[tuple[str, str]]:
    """What was changed, and a tokenizer.json; `source` is a sound one."""
    for part, values in PARTS.items():
        for value in values:
            yield f"{part} = {value!r:.80}", json.dumps({**source, part: value})
    draw = random.Random(seed)
    places = [at for at in _places(source) if not (len(at) > 3 and at[0] == "model")]
    while True:
        data = copy.deepcopy(source)
        changes = [_change_tokenizer(data, places, draw) for _ in range(draw.choice([1, 2, 3]))]
        yield "; ".join(changes), json.dumps(data)


def _change_tokenizer(data: dict[str, Any], places: list[tuple[Any, ...]], draw: random.Random) -> str:
    kind = draw.random()
    vocabulary = data["model"].get("vocab") if isinstance(data.get("model"), dict) else None
    if kind < 0.4:
        part = draw.choice(list(PARTS))
        data[part] = copy.deepcopy(draw.choice(PARTS[part]))
        return f"{part} = {data[part]!r:.80}"
    if kind < 0.5 and isinstance(data.get("added_tokens"), list):
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = {flag: draw.random() < 0.5 for flag in flags}
        token["id"] = draw.choice([0, 1, 511, 512, 600, 10**6, 2**31, 2**32 - 1])
        token["content"] = draw.choice(["Once", " ", "", "\0", "<s>", "upon", "o"])
        data["added_tokens"].append(token)
        return f"added {token}"
    if kind < 0.6 and isinstance(vocabulary, dict) and vocabulary:
        word = draw.choice(list(vocabulary))
        vocabulary[word] = draw.choice([0, -1, 511, 512, 10**6, 2**31 - 1, 2**32 - 1, 2**33, 0.5, None])
        return f"vocab[{word!r}] = {vocabulary[word]!r}"
    return _junk_at(data, draw.choice(places), draw)


Change = Callable[[Path], None]


def folders(seed: int) -> Iterator[tuple[str, Change]]:
    """What is changed, and how: a function of a sound folder, a copy that may be spoilt."""
    yield from special_files()
    for name, number in itertools.product(
        ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"), range(4)
    ):
        content = (b"[" * 200_000, b"\xff\xfe", b'{"a": ' + b"1" * 5000 + b"}", b"null")[number]
        yield f"{name} is {content[:8]!r}", lambda folder, n=name, c=content: _put(folder / n, c)
    yield from random_changes(seed)


def random_changes(seed: int) -> Iterator[tuple[str, Change]]:
    """As `folders`, without the known ones."""
    draw = random.Random(seed)
    while True:
        kind = draw.choice((_change_config, _change_names, _change_header, _change_bytes))
        number = draw.getrandbits(32)
        yield f"{kind.__name__} {number}", lambda folder, k=kind, n=number: k(folder, random.Random(n))


def special_files() -> Iterator[tuple[str, Change]]:
    """Pipes, devices, folders and files without end, under the names that are read."""
    names = (
        "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "special_tokens_map.json", "chat_template.jinja", "model.safetensors", "model.safetensors.index.json",
    )  # fmt: skip
    makers: dict[str, Change] = {
        "a folder": lambda path: path.mkdir(),
        "a dead link": lambda p: p.symlink_to("no"),
    }
    if hasattr(os, "mkfifo"):
        makers["a pipe"] = lambda path: os.mkfifo(path)
    if Path("/dev/zero").exists():
        makers["a device"] = lambda path: path.symlink_to("/dev/zero")
    makers["a terabyte"] = _make_sparse
    for name, (kind, make) in itertools.product(names, makers.items()):

        def change(folder: Path, name: str = name, make: Change = make) -> None:
            (folder / name).unlink(missing_ok=True)
            make(folder / name)

        yield f"{name} is {kind}", change


def _make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


_CONFIG_KEYS = (
    "rope_scaling", "sliding_window", "num_local_experts", "layer_types", "attention_bias", "head_dim",
    "tie_word_embeddings", "quantization_config", "num_key_value_heads", "max_position_embeddings",
    "vocab_size", "hidden_act", "rope_theta", "torch_dtype", "partial_rotary_factor", "architectures",
    "auto_map", "eos_token_id", "bos_token_id", "rope_parameters", "num_experts", "num_experts_per_tok",
)  # fmt: skip
_MODEL_TYPES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "olmoe", "gemma", "gemma2", "gemma3_text",
    "phi3", "gpt2", "opt", "stablelm", "granite", "granitemoehybrid", "smollm3", "phi", "ernie4_5",
    "ministral3", "olmo2", "olmo3", "exaone4", "qwen2_moe", "gpt_oss",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    *JUNK,
    {"type": "linear", "factor": 2},
    {"rope_type": "yarn", "factor": 1e30},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 0, "high_freq_factor": 0,
     "original_max_position_embeddings": 0},
    ["full_attention"] * 5,
)  # fmt: skip


def _change_config(folder: Path, draw: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for _ in range(draw.choice([1, 1, 2, 3])):
        key = draw.choice([*config, *_CONFIG_KEYS])
        value = config.get(key)
        if draw.random() < 0.15:
            config["model_type"] = draw.choice(_MODEL_TYPES)
        elif isinstance(value, dict) and value and draw.random() < 0.8:
            value[draw.choice(sorted(value))] = draw.choice(_VALUES)
        elif isinstance(value, int) and draw.random() < 0.3:
            config[key] = draw.choice([value * 2, value // 2, value + 1, -value, value * 10**9])
        else:
            config[key] = draw.choice(_VALUES)
    _put(folder / "config.json", json.dumps(config).encode())
    if draw.random() < 0.2:
        key = draw.choice(["eos_token_id", "bos_token_id", "max_length"])
        _put(folder / "generation_config.json", json.dumps({key: draw.choice(JUNK)}).encode())


def _change_names(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(["tokenizer_config.json", "special_tokens_map.json"])
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    values = (*JUNK, [{"name": "default", "template": 5}], [{"name": [1], "template": "x"}], {"content": 5},
              {"content": "<s>"}, [{"name": "a", "template": "x"}], [5])  # fmt: skip
    for _ in range(draw.choice([1, 2])):
        key = draw.choice([*config, "chat_template", "eos_token", "bos_token", "auto_map"])
        config[key] = draw.choice(values)
    _put(path, json.dumps(config).encode())


def _change_header(folder: Path, draw: random.Random) -> None:
    """A safetensors header, which its data belies."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for _ in range(draw.choice([1, 2])):
        name = draw.choice([each for each in header if each != "__metadata__"])
        field = draw.choice(["dtype", "shape", "data_offsets", "left out", "renamed"])
        entry = header.pop(name)
        if field == "dtype":
            entry["dtype"] = draw.choice(["F64", "I8", "BF16", "F16", "BOOL", "F8_E4M3", "F4", "X", None, 5])
        elif field == "shape":
            entry["shape"] = draw.choice(
                [[], [0], [-1], [1 << 62, 4], [1 << 31] * 4, [64], entry["shape"][::-1], "x", [1.5]]
            )
        elif field == "data_offsets":
            entry["data_offsets"] = draw.choice(
                [[0, 0], [-4, 4], [1 << 62, 1 << 63], [8, 4], [0, 1 << 40], "x", [0]]
            )
        if field != "left out":
            header[name + ("x" if field == "renamed" else "")] = entry
    text = json.dumps(header).encode()
    _put(path, len(text).to_bytes(8, "little") + text + raw[8 + size :])


def _change_bytes(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(["model.safetensors", "config.json", "tokenizer.json"])
    raw = bytearray(path.read_bytes())
    kind = draw.random()
    if kind < 0.5:
        for _ in range(draw.randint(1, 8)):
            raw[draw.randrange(min(len(raw), 6000))] = draw.randrange(256)
    elif kind < 0.8:
        del raw[draw.randrange(len(raw)) :]
    else:
        raw[:8] = draw.choice([0, 1, 1 << 63, 1 << 40, 2**64 - 1]).to_bytes(8, "little")
    _put(path, bytes(raw))


def _put(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield (*at, key)
        yield from _places(child, (*at, key))


def _junk_at(data: Any, at: tuple[Any, ...], draw: random.Random) -> str:
    value = draw.choice(JUNK)
    for key in at[:-1]:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return "nothing"
    with contextlib.suppress(TypeError, IndexError):  # An earlier change may have put something else there.
        data[at[-1]] = value
    return f"{at} = {value!r:.40}"
