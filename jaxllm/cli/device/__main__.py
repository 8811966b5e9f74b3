"""Runs `python -m jaxllm.cli.device`."""

from pathlib import Path

from jaxllm.cli.entry import run_process


def main(folder: Path | None = None) -> None:
    """Entry point of the process; `folder` is that of the programs, None if an argument names it."""

    def command() -> None:
        # Imported after the handler of Ctrl-C is installed.
        from jaxllm.cli.device import command

        command.main(folder=folder)

    run_process(command)


if __name__ == "__main__":
    main()
