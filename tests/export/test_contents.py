"""The table of programs and formats in the documents is what exporters hold and refuse."""

from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.export.contents import CONTENTS, require_contents
from jaxllm.export.signatures import ExportPlan

PAGE = Path("docs/guides/export.md")
# Attribute of `Contents` -> the row of the table.
ROWS = {
    "blocks": "decode of several tokens, with sampling",
    "verified": "verification of drafts",
    "levels": "levels, with their recovery adapters",
    "short_caches": "short caches",
    "masks": "an attention mask as an input",
    "npu": "embedder, auxiliary model and layers apart, for an NPU",
    "stages": "stages of prefill for two processors (w8a8)",
    "encoders": "encoder-decoders (not w8a8)",
    "tiny_lm": "the tiny LM, which plans calls",
    "adapters": "adapters as an input (decoders alone)",
    "codecs": "codecs of contexts (decoders alone)",
    "precisions": "`--precision`",
}


def cell(value):
    if isinstance(value, tuple):
        return ", ".join(value)
    return {True: "yes", False: "no", "": "no"}.get(value, str(value))


def as_markdown():
    """Programs and formats, as Markdown."""
    lines = [["", *(f"`{name}`" for name in CONTENTS)], ["---"] * (1 + len(CONTENTS))]
    lines.append(["prefill of a chunk, decode of a token", *("yes" for _ in CONTENTS)])
    for name, title in ROWS.items():
        lines.append([title, *(cell(getattr(each, name)) for each in CONTENTS.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_table_is_up_to_date():
    written = PAGE.read_text(encoding="utf-8").split("<!-- contents -->\n")[1]
    assert written.split("<!-- end of contents -->")[0].strip() == as_markdown()


def test_what_a_format_lacks_is_named():
    plan = ExportPlan(verify_tokens=(8,), block_tokens=4, cache_tokens=(16,))
    wanted = "--level, --verify-tokens, --block-tokens, --cache-tokens; leave them out"
    with pytest.raises(ConfigError, match=wanted):
        require_contents("litertlm", plan, levels=2)
    for kind in set(CONTENTS) - {"litertlm"}:
        require_contents(kind, plan, levels=2)
