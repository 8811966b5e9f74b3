"""The kinds of files that are harmed: of which files a victim is made, and what is of interest in them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.torture import codecs as formats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file.

    Attributes:
      name: of the kind, and of its folder among the victims.
      use: by which its copies are used; that of the kind's name unless it is given.
      codecs: of its files, by pattern.
      values: of keys in its documents that are of interest.
      sign: makes checksums right again that are in another file than what they are of.
      share: of all mutations, relative to other kinds'.
      deep: the share of its cases that go all the way to an answer.
    """

    name: str
    use: str = ""
    codecs: Mapping[str, formats.Codec]
    values: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    sign: Callable[[Path], None] | None = None
    share: float = 1.0
    deep: float = 0.0

    def files(self, victims: Path) -> dict[str, formats.Codec]:
        """The codec of each of its victim's files."""
        folder = victims / self.name
        found = {
            str(path.relative_to(folder)): codec
            for pattern, codec in self.codecs.items()
            for path in sorted(folder.glob(pattern))
            if path.is_file()
        }
        assert found, f"{self.name} has no files in {folder}"
        return found


def _bundle(name: str, share: float) -> Kind:
    return Kind(
        name=name, use="bundle", codecs={"model.jaxllm": formats.BundleFile()}, share=share, deep=0.03
    )


# Values that readers of each format once tripped over, by the key that they stand under.
_ROTARY = (
    {"type": "linear", "factor": 2},
    {"rope_type": "yarn", "factor": 1e30},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 0, "high_freq_factor": 0},
)
CONFIG: Mapping[str, Sequence[Any]] = {
    "model_type": (
        "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "olmoe", "gemma2", "phi3", "gpt2",
    ),
    "rope_scaling": _ROTARY,
    "rope_parameters": _ROTARY,
    "hidden_act": ("relu", "gelu", "x"),
    "torch_dtype": ("float16", "x", 5),
    "dtype": ("F64", "I8", "BF16", "F16", "BOOL", "U8", "F8_E4M3", "X", None, 5),
    "shape": ([], [0], [-1], [1 << 62, 4], [64], "x", [1.5]),
    "data_offsets": ([0, 0], [-4, 4], [1 << 62, 1 << 63], [8, 4], [0, 1 << 40], "x", [0]),
}  # fmt: skip
_TEMPLATES = (
    "{{", "{% for", "", "{{ 'a' * 10**10 }}", "{{ messages[9].content }}", "{{ ''.__class__.__mro__ }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 10 ** 10 ** 9 }}", "{{ 'a'|center(2000000000)|length }}",
    "{{ ('\\n'*1000000)|indent(10000)|length }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", 5, [],
)  # fmt: skip
TOKENIZER: Mapping[str, Sequence[Any]] = {
    "chat_template": _TEMPLATES,
    "normalizer": (
        {"type": "Replace", "pattern": {"Regex": "(a*)*$"}, "content": "b" * 1000},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
        {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="},
        {"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 5000},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ),
    "pre_tokenizer": (
        {"type": "Split", "pattern": {"Regex": "(?:(?:o+)+)+x"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "(?=((.*)*)*)"}, "behavior": "Removed", "invert": True},
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        {"type": "Metaspace", "replacement": "", "prepend_scheme": "first", "split": True},
        {"type": "FixedLength", "length": 0},
        {"type": "Digits", "individual_digits": True},
        None,
    ),
    "decoder": (
        {"type": "Strip", "content": " ", "start": 10**9, "stop": 0},
        {"type": "Strip", "content": "a", "start": 0, "stop": 1 << 40},
        {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": "y"},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "Fuse"},
    ),
    "post_processor": (
        *(
            {"type": "TemplateProcessing", "single": [each], "pair": [], "special_tokens": {}}
            for each in (
                {"SpecialToken": {"id": "nope", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            )
        ),
        {"type": "BertProcessing", "sep": ["s", 2**32 - 1], "cls": ["c", 1]},
        None,
    ),
    "model": (
        {"type": "Unigram", "unk_id": 0, "vocab": []},
        {"type": "Unigram", "unk_id": 5, "vocab": [["a", -1.0]]},
        {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0], ["a", -1e308]]},
        {"type": "WordLevel", "vocab": {"a": 4294967295, "<unk>": 1}, "unk_token": "<unk>"},
        {"type": "BPE", "vocab": {}, "merges": [], "unk_token": "q"},
        {"type": "BPE", "vocab": {"a": 0, "b": 0, "ab": 0}, "merges": [["a", "b"]], "dropout": 0.5},
    ),
}
ADAPTER: Mapping[str, Sequence[Any]] = {
    **{name: CONFIG[name] for name in ("dtype", "shape", "data_offsets")},
    "target_modules": ("all-linear", ".*", "(a+)+$", ["q_proj"]),
    "rank_pattern": ({"(a+)+$": 4}, {".*": 10**9}, {"layers.0.self_attn.q_proj": 3}),
    "peft_type": ("LOHA", 5),
    "r": (0, -1, 10**9, 1.5),
}
_FOLDER = {
    "config.json": formats.Json(),
    "generation_config.json": formats.Json(),
    "*.safetensors": formats.Safetensors(),
}
_TOKENIZER_FILES = {
    "tokenizer*.json": formats.Json(),
    "special_tokens_map.json": formats.Json(),
    "*.jinja": formats.Codec(),
}
_CONTEXTS = {
    "store/catalog.sqlite": formats.CatalogFile(),
    "store/app-*/*/*.kv": formats.SegmentFile(),
}
KINDS: tuple[Kind, ...] = (
    _bundle("bundle", 2.0),
    _bundle("elastic", 1.5),
    _bundle("mixture", 1.0),
    _bundle("apart", 1.0),
    _bundle("calibrated", 1.5),
    Kind(name="folder", codecs=_FOLDER, values=CONFIG, share=1.5, deep=0.03),
    Kind(
        name="tokenizer", codecs=_TOKENIZER_FILES, values=TOKENIZER,
        share=2.0,
    ),
    Kind(
        name="adapter", values=ADAPTER, share=1.5, deep=0.02,
        codecs={"*.json": formats.Json(), "*.safetensors": formats.Safetensors()},
    ),
    Kind(name="contexts", codecs=_CONTEXTS, share=3.0, deep=0.05),
    Kind(name="trace", codecs={"trace.jsonl": formats.JsonLines()}, share=1.5),
    Kind(name="profile", codecs={"profile.json": formats.CheckedJson()}, share=1.5),
    Kind(name="recipe", codecs={"**/*.toml": formats.Toml()}, share=1.0),
    Kind(
        name="tasks",
        codecs={"tasks/*/*.jsonl": formats.JsonLines(), "tasks/ui_automation/*.json": formats.Json()},
    ),
    Kind(
        name="program", sign=formats.sign_program, share=0.7, deep=0.1,
        codecs={**_FOLDER, "*.json": formats.Json(), "**/*.stablehlo": formats.Signed()},
    ),
    Kind(name="graphs", codecs={"**/*": formats.Codec()}, share=0.1),
)  # fmt: skip
