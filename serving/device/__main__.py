"""Runs `python -m serving.device`."""

from serving.entry import run_process


def main() -> None:
    """Entry point of the process."""

    def command() -> None:
        # Imported where Ctrl-C is handled already.
        from serving.device import command

        command.main()

    run_process(command)


if __name__ == "__main__":
    main()
