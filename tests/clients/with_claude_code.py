"""Claude Code, headless: it runs a command, and tells what that said."""

import os
import subprocess
import sys
from pathlib import Path

program = Path(os.environ["JAXLLM_CLIENTS"]) / "node/node_modules/.bin/claude"
variables = {
    "ANTHROPIC_BASE_URL": sys.argv[1], "ANTHROPIC_API_KEY": "none",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}  # fmt: skip
command = [program, "-p", "What is the weather in Paris?", "--model", "tiny", "--allowedTools", "Bash"]
done = subprocess.run(
    command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=os.environ | variables
)
assert done.stdout.strip() == "It is 21 degrees in Paris.", done
