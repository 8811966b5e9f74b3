"""`jaxllm completion`: prints completion scripts for shells."""

import click
from click.shell_completion import get_completion_class

_VARIABLE = "_JAXLLM_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes jaxllm's commands and options in a shell.

    Reads and writes no files: put the script where your shell looks for it, or run it at each start.

    \b
    Example:
      echo 'eval "$(jaxllm completion bash)"' >> ~/.bashrc
      echo 'eval "$(jaxllm completion zsh)"' >> ~/.zshrc
      jaxllm completion fish > ~/.config/fish/completions/jaxllm.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "jaxllm", _VARIABLE).source())
