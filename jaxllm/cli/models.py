"""`jaxllm models`, `jaxllm pull` and `jaxllm rm`: lists models, downloads them and removes them."""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import print_columns, print_json, progress_bars
from jaxllm.cli.shared_options import json_option
from jaxllm.errors import ConfigError
from jaxllm.formats import HUB, PACKAGE

if TYPE_CHECKING:
    from jaxllm.serving.sources.licences import Licence

# That of this repository, whose recipes made the packaged models.
_OWN_LICENCE = "Apache-2.0"


@click.command("models")
@json_option
def models_command(as_json: bool) -> None:
    """List the models on this machine, by the names that --model takes.

    Lists the packaged models, those of installed Python packages, and those in Hugging Face's cache; of the
    last, jaxllm removes only what it has pulled.

    \b
    Example:
      jaxllm models
    """
    from jaxllm.serving.ground.bundles import find_model, packaged_models
    from jaxllm.serving.sources.packages import installed_models

    rows = [_row(name, "jaxllm", "bundle", find_model(name), _OWN_LICENCE) for name in packaged_models()]
    rows += [
        _row(each.name, "package", each.format, each.path, each.licence.name, each.size_bytes)
        for each in installed_models()
    ]
    if importlib.util.find_spec("huggingface_hub") is not None:
        from jaxllm.serving.sources.hub_cache import cached_models

        for each in cached_models():
            origin = "hub" if each.pulled else "hub, another program's"
            rows.append(_row(each.name, origin, each.format, each.path, each.licence, each.size_bytes))
    if as_json:
        print_json({"models": rows})
        return
    cells = [
        (each["name"], each["from"], each["format"], each["licence"] or "-", f"{each['bytes'] / 1e6:,.1f} MB")
        for each in rows
    ]
    print_columns(("model", "from", "format", "licence", "size"), cells, texts=4)


@click.command("pull")
@click.argument("name")
@click.option(
    "--accept-license",
    is_flag=True,
    help="Accept a licence that asks for consent, instead of being asked on a terminal.",
)
@json_option
def pull_command(name: str, accept_license: bool, as_json: bool) -> None:
    """Download a model of the hub, or what its newest revision has changed.

    NAME is hf:OWNER/NAME, of its safetensors or its only GGUF file; hf:OWNER/NAME:FILE names one of several,
    and @REVISION behind the first NAME a branch, tag or commit. An ended download resumes. Every file is
    verified. For package:NAME of an installed package it only asks for consent to the licence. Prints the
    model's path.

    \b
    Example:
      jaxllm pull hf:HuggingFaceTB/SmolLM2-135M-Instruct
      jaxllm pull hf:google/gemma-3-270m-it --accept-license
    """

    def consent(licence: "Licence") -> None:
        if not licence.asks or licence.accepted:
            return
        if not accept_license:
            if not _is_terminal():
                licence.require_consent()
            click.echo(f"{licence.model}: the licence is {licence.name}, at {licence.terms}", err=True)
            if not click.confirm("Do you accept it?", err=True):
                raise ConfigError(f"the licence of {licence.model} was not accepted; nothing was downloaded")
        licence.accept()

    if name.startswith(PACKAGE):
        from jaxllm.serving.sources.packages import find_packaged

        found = find_packaged(name)
        consent(found.licence)
        path = found.path
    elif name.startswith(HUB):
        from jaxllm.serving.sources.hub import pull
        from jaxllm.serving.sources.hub_cache import HubName

        with progress_bars() as progress:
            path = pull(HubName.parse(name), progress, consent=consent)
    else:
        raise ConfigError(f"{name!r:.80} is not of the hub; write hf:OWNER/NAME, or use the path as it is")
    if as_json:
        print_json({"name": name, "path": str(path)})
        return
    click.echo(path)


@click.command("rm")
@click.argument("name")
@json_option
def rm_command(name: str, as_json: bool) -> None:
    """Remove a model that was pulled, and what was prepared of it.

    NAME is a name of `jaxllm models`; hf:OWNER/NAME removes all that was pulled of that repository. Files
    that other programs downloaded stay.

    \b
    Example:
      jaxllm rm hf:HuggingFaceTB/SmolLM2-135M-Instruct
    """
    if name.startswith(PACKAGE):
        raise ConfigError(f"{name} is pip's: run `pip uninstall {name.removeprefix(PACKAGE)}`")
    if not name.startswith(HUB):
        raise ConfigError(f"{name!r:.80} was not pulled: jaxllm removes only models named by hf:OWNER/NAME")
    from jaxllm.serving.ground.bundles import remove_prepared
    from jaxllm.serving.sources.hub_cache import HubName, remove

    freed = remove(HubName.parse(name), remove_prepared)
    if as_json:
        print_json({"name": name, "freed_bytes": freed})
        return
    click.echo(f"{name}: {freed / 1e6:,.1f} MB freed")


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _row(
    name: str, origin: str, form: str, path: Path, licence: str, size_bytes: int | None = None
) -> dict[str, Any]:
    size = path.stat().st_size if size_bytes is None else size_bytes
    return {
        "name": name,
        "from": origin,
        "format": form,
        "bytes": size,
        "licence": licence,
        "path": str(path),
    }
