"""Values that readers of each format once tripped over, by the key that they stand under."""

from collections.abc import Mapping, Sequence
from typing import Any

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
