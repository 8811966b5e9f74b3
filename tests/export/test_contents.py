"""The table of programs and formats in the documents is what exporters hold and refuse."""

from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.export.contents import CONTENTS, as_markdown, require_contents
from jaxllm.export.signatures import ExportPlan

PAGE = Path("docs/guides/export.md")


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
