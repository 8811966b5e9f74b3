"""Runs llama.cpp's and vLLM's server tests: python -m tests.foreign.server_suites FOLDER

The tests come from the source distributions of `llama-cpp-python` and `vllm`, into the folder, unless they
are there; none of their code is in this repository. What is skipped, and why, is printed, and listed in
`suite_skips.json`. A failure that `suite_failures.json` gives no reason for ends with status 1.
"""

import collections
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as Tree
from pathlib import Path

import click

from tests.foreign.sources import LLAMA, VLLM, fetch

HERE = Path(__file__).parent
FILES = {
    "llama": [f"unit/test_{name}.py" for name in (
        "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "embedding", "basic",
        "security", "template", "ignore_eos", "tokenize", "tool_call",
    )],
    "vllm": [f"tests/entrypoints/{name}" for name in (
        "anthropic/test_messages.py", "openai/chat_completion/test_chat.py",
        "openai/chat_completion/test_chat_completion.py", "openai/chat_completion/test_chat_echo.py",
        "openai/chat_completion/test_chat_logit_bias_validation.py",
        "openai/chat_completion/test_completion_with_function_calling.py",
        "openai/completion/test_completion.py", "openai/responses/test_basic.py",
        "openai/responses/test_function_call.py", "openai/responses/test_simple.py",
        "openai/responses/test_stateful.py", "openai/responses/test_structured_output.py",
        "openai/test_chunked_prompt.py", "serve/tokenize/test_tokenization.py",
    )],
}  # fmt: skip
_PLACES = {
    "llama": (LLAMA, r"vendor/llama\.cpp/((?:tools/server/tests|models/templates)/.+)"),
    "vllm": (VLLM, r"(tests/(?:__init__\.py|entrypoints/.+\.py))"),
}
_FOLDERS = {"llama": "llama/tools/server/tests", "vllm": "vllm"}


def run(suite: str, folder: Path, *arguments: str) -> list[tuple[str, str, str]]:
    """Runs a suite; returns the id, outcome and reason of each test."""
    place = folder / _FOLDERS[suite]
    if not place.exists():
        name, members = _PLACES[suite]
        fetch(name, folder / suite, members)
    report = folder / f"{suite}.xml"
    report.unlink(missing_ok=True)
    # Else pytest reads the options of this repository, if the folder is inside of it.
    (place / "pytest.ini").touch()
    options = ["-q", "--timeout=120", "-psuite_bridge", "-pno:cacheprovider", "-oasyncio_mode=auto"]
    options += ["-oasyncio_default_fixture_loop_scope=function"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *arguments]
    paths = os.pathsep.join([str(HERE), str(folder / "packages"), str(place)])
    environment = os.environ | {"PYTHONPATH": paths}
    with (folder / f"{suite}.log").open("w") as log:
        subprocess.run([*command, *FILES[suite]], cwd=place, env=environment, stdout=log, check=False)
    found = []
    for case in Tree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        kinds = {each.tag: each for each in case}
        kind = next((each for each in ("failure", "error", "skipped") if each in kinds), "passed")
        found.append((name, kind, kinds[kind].get("message", "") if kind in kinds else ""))
    return found


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--suite", type=click.Choice([*FILES]), help="one of both")
@click.option("-k", "which", default="", help="tests, as pytest's option")
def main(folder: Path, suite: str | None, which: str) -> None:
    """Runs both suites, and prints what passed, failed and was skipped, with reasons."""
    folder = folder.resolve()
    if not (packages := folder / "packages").exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*install, "pytest-asyncio", "regex"], check=True)
    known, unknown = json.loads((HERE / "suite_failures.json").read_text()), 0
    for each in [suite] if suite else FILES:
        found = run(each, folder, *(["-k", which] if which else []))
        counts = collections.Counter(kind for _, kind, _ in found)
        reasons = collections.Counter(why for _, kind, why in found if kind == "skipped")
        for name, kind, why in found:
            if kind in ("failure", "error"):
                reason = next((reason for part, reason in known.items() if part in f"{name}$"), "")
                unknown += not reason
                print(f"  failed: {name}: {reason or why.splitlines()[0][:150]}")
        for reason, count in reasons.most_common():
            print(f"  skipped: {count}: {reason}")
        print(f"{each}: {counts['passed']} passed, {counts['failure'] + counts['error']} failed, "
              f"{counts['skipped']} skipped")  # fmt: skip
    sys.exit(unknown > 0)


if __name__ == "__main__":
    main()
