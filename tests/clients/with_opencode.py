"""opencode, headless: it thinks, runs a command, and tells what that said."""

import json
import os
import subprocess
import sys
from pathlib import Path

model = {
    "name": "default", "reasoning": True, "tool_call": True, "limit": {"context": 100000, "output": 4000},
    "options": {"reasoningEffort": "high"},
}  # fmt: skip
provider = {
    "npm": "@ai-sdk/openai-compatible", "name": "own", "models": {"default": model},
    "options": {"baseURL": f"{sys.argv[1]}/v1", "apiKey": "none"},
}  # fmt: skip
config = {"autoupdate": False, "share": "disabled", "provider": {"own": provider}}
Path("opencode.json").write_text(json.dumps(config))
program = Path(os.environ["JAXLLM_CLIENTS"]) / "node/node_modules/.bin/opencode"
command = [program, "run", "--model", "own/default", "--format", "json", "--thinking"]
done = subprocess.run(
    [*command, "What is the weather in Paris?"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
    check=False,
)  # fmt: skip
events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
parts = [each["part"] for each in events if "part" in each]
ran = [part["state"]["output"].strip() for part in parts if part["type"] == "tool"]
assert ran == ["21 degrees"], done
texts = [part["text"].strip() for part in parts if part["type"] == "text"]
assert texts == ["It is 21 degrees in Paris."], done
thoughts = [part["text"].strip() for part in parts if part["type"] == "reasoning"]
assert thoughts == ["They ask for the weather."] * 2, done
