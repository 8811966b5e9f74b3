"""`jaxllm keys`: makes, lists and removes apps' API keys. `jaxllm completion`: scripts for shells."""

from datetime import UTC, datetime
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from jaxllm.cli.console import print_json
from jaxllm.cli.shared_options import json_option, path_option

_VARIABLE = "_JAXLLM_COMPLETE"

_file_option = path_option(
    "--file",
    "path",
    help="The key file.  [default: $JAXLLM_KEYS, else keys.json in the user's config folder]",
)


@click.group("keys")
def keys_command() -> None:
    """Make, list and remove API keys of apps.

    As soon as there is a key, apps that call a service over HTTP need one. A running service sees changes at
    its next request.
    """


@keys_command.command("add")
@click.argument("app")
@click.option(
    "--operator",
    is_flag=True,
    help="Allow the key to read metrics and the dashboard, and to change adapters.",
)
@_file_option
@json_option
def add_command(app: str, operator: bool, path: Path | None, as_json: bool) -> None:
    """Make a key of APP and print it.

    The key is shown only once: only a digest is stored.

    \b
    Example:
      jaxllm keys add mail
      jaxllm keys add admin --operator
    """
    from jaxllm.serving.server.identity import add_key, default_keys_file

    key, stored = add_key(path or default_keys_file(), app, operator=operator)
    if as_json:
        print_json({"key": key, "id": stored.id, "app": stored.app, "operator": stored.operator})
        return
    click.echo(key)


@keys_command.command("list")
@_file_option
@json_option
def list_command(path: Path | None, as_json: bool) -> None:
    """List the keys by app, without the keys themselves.

    \b
    Example:
      jaxllm keys list
    """
    from jaxllm.serving.server.identity import default_keys_file, read_keys

    keys = read_keys(path or default_keys_file())
    if as_json:
        rows = [
            {"id": each.id, "app": each.app, "created_s": each.created_s, "operator": each.operator}
            for each in keys
        ]
        print_json({"keys": rows})
        return
    for each in keys:
        made = datetime.fromtimestamp(each.created_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
        click.echo(f"{each.id}  {each.app}  made {made}{', operator' if each.operator else ''}")
    click.echo(f"{len(keys)} keys")


@keys_command.command("remove")
@click.argument("which", metavar="ID|APP")
@_file_option
@json_option
def remove_command(which: str, path: Path | None, as_json: bool) -> None:
    """Remove the key ID, or all keys of APP.

    Without any key in the file nobody can call over HTTP; remove the file to have a service without keys.

    \b
    Example:
      jaxllm keys remove mail
    """
    from jaxllm.serving.server.identity import default_keys_file, read_keys, remove_keys

    path = path or default_keys_file()
    gone = remove_keys(path, which)
    left = len(read_keys(path))
    if as_json:
        print_json({"removed": [each.id for each in gone], "left": left})
        return
    for each in gone:
        click.echo(f"{each.id}  {each.app}")
    rest = "" if left else f": nobody can call over HTTP now; remove {path} to need no keys"
    click.echo(f"{len(gone)} removed, {left} left{rest}")


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
