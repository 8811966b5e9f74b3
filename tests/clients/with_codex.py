"""Codex, headless: it thinks, runs a command, and tells what that said."""

import json
import os
import subprocess
import sys
from pathlib import Path

CONFIG = f"""
model = "default"
model_provider = "own"
model_reasoning_effort = "high"
[model_providers.own]
name = "own"
base_url = "{sys.argv[1]}/v1"
wire_api = "responses"
"""
folder = Path(os.environ["HOME"]) / ".codex"
folder.mkdir()
(folder / "config.toml").write_text(CONFIG)
program = Path(os.environ["JAXLLM_CLIENTS"]) / "node/node_modules/.bin/codex"
command = [program, "exec", "--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
done = subprocess.run(
    [*command, "What is the weather in Paris?"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
    check=False,
)  # fmt: skip
events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
items = [each["item"] for each in events if each["type"] == "item.completed"]
ran = [each for each in items if each["type"] == "command_execution"]
assert [each["aggregated_output"].strip() for each in ran] == ["21 degrees"], done
assert items[-1].get("text") == "It is 21 degrees in Paris.", done
thoughts = [each["text"] for each in items if each["type"] == "reasoning"]
assert thoughts == ["They ask for the weather."] * 2, items
