"""Runs `jaxllm bench train` without the package's commands: `python -m benchmarks.train`."""

from benchmarks.train import train_command
from jaxllm.cli.lazy import run_command

if __name__ == "__main__":
    run_command(train_command, "python -m benchmarks.train")
