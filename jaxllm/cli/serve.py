"""`jaxllm serve`: runs the service that apps call over HTTP or a Unix socket."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import click

from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.shared_options import listening_options, named_folders_option, path_option
from jaxllm.errors import ConfigError
from jaxllm.option_types import Size

PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client")


@click.command("serve", cls=EngineCommand)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="A bundle, a Hugging Face folder, a GGUF file, a packaged model's name, package:NAME of an "
    "installed package, or hf:OWNER/NAME of the hub.  [default: default]",
)
@click.option("--alias", metavar="NAME", help="The model's name in calls.  [default: derived from MODEL]")
@click.option(
    "--context",
    "context_tokens",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Maximum number of tokens of prompt and answer together.  [default: the model's window, up to 2048]",
)
@listening_options
@click.option(
    "--localhost-pages",
    is_flag=True,
    default=None,
    help="Let web pages that are served on this machine's loopback call, such as those of a development "
    "server.",
)
@click.option(
    "--open", "open_browser", is_flag=True, default=None, help="Open the dashboard in a browser when ready."
)
@path_option(
    "--contexts",
    metavar="DIR",
    help="Store apps' contexts in a folder, across restarts.  [default: no contexts]",
)
@click.option(
    "--context-budget",
    type=Size(),
    help="Memory limit of contexts that are not running, e.g. 500MB.  [default: 256MiB]",
)
@path_option(
    "--context-keys",
    metavar="DIR",
    help="Encrypt stored contexts with keys in this folder, one per app.  [default: no encryption]",
)
@click.option(
    "--attend-quantized-kv",
    is_flag=True,
    default=None,
    help="Attend to stored chunks of contexts in place, without a copy in a cache: faster switches and less "
    "memory; requires resident weights.",
)
@named_folders_option(
    "--adapter",
    help="A low-rank adapter that calls may name, a folder in PEFT's layout. Repeatable.",
)
@path_option(
    "--adapters",
    metavar="DIR",
    help="Folder of further adapters that operators may load at runtime.  [default: none]",
)
@click.option("--memory", type=Size(), help="Memory limit of the process, e.g. 2GB.")
@click.option(
    "--follow-pressure",
    is_flag=True,
    default=None,
    help="Also without --memory, release memory under memory pressure on this machine (Linux).",
)
@click.option(
    "--model-sampling/--no-model-sampling",
    default=None,
    help="Default to the model's recommended sampling (generation_config.json) for calls without their own.  "
    "[default: on]",
)
@path_option("--chat-template", help="Replace the model's chat template by a file of Jinja source.")
@click.option(
    "--draft",
    metavar="DRAFT",
    help="Draft tokens for the whole model's answers in unbatched decoding, as `jaxllm generate --draft`; "
    "none for no drafts.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Minimum log level (requests are logged at info).  [default: info]",
)
def serve_command(config: Path | None, adapter: dict[str, Path], **given: Any) -> None:
    """Serve a model to the apps of this device.

    It speaks OpenAI's, Anthropic's and Ollama's protocols. SIGTERM and Ctrl-C wait for running answers; a
    second one ends at once. Logs are JSON lines on stderr.

    \b
    Example:
      jaxllm serve --http 127.0.0.1:8080
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the service needs the package {package}; run `pip install 'jaxllm[serve]'`")
    from jaxllm.cli.model_choice import speculation
    from jaxllm.serving.server.daemon import run
    from jaxllm.serving.server.opening import open_service
    from jaxllm.serving.server.service_options import ServerOptions, read_options

    given = {name: value for name, value in given.items() if value is not None}
    given |= {"adapter": adapter} if adapter else {}
    options = dataclasses.replace(ServerOptions() if config is None else read_options(config), **given)
    drafts = speculation(options.draft)
    run(options, lambda progress: open_service(options, drafts, progress), config=config)
