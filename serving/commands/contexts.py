"""`jaxllm contexts`: what a folder of contexts holds, and whether it is whole."""

from pathlib import Path

import click

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.kv.recompute import LOST
from serving.console import print_json
from serving.contexts.store import VERSION_FILE, ContextStore


@click.group("contexts")
def contexts_command() -> None:
    """Look into a folder of contexts that outlive calls, and check it."""


@contexts_command.command("list")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--app", help="Only this app's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(folder: Path, app: str | None, as_json: bool) -> None:
    """List the contexts in FOLDER."""
    with _opened(folder) as store:
        rows = [
            {
                "app": record.app,
                "name": record.name,
                "level": record.origin.level,
                "codec": record.origin.codec,
                "tokens": len(record.tokens),
                "chunks": len(record.bits),
                "lost": record.bits.count(LOST),
                "pinned": record.pinned,
            }
            for record in store.records(app)
        ]
        used = store.used_bytes(app)
    if as_json:
        print_json({"contexts": rows, "used_bytes": used})
        return
    for row in rows:
        pinned = ", pinned" if row["pinned"] else ""
        click.echo(
            f"{row['name']}  {row['app']}  {row['tokens']} tokens at level {row['level']}, "
            f"{row['chunks']} chunks by {row['codec']}{pinned}"
        )
    click.echo(f"{len(rows)} contexts, {used:,} bytes")


@contexts_command.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--repair", is_flag=True, help="Have what is damaged computed again; drop what cannot be.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(folder: Path, repair: bool, as_json: bool) -> None:
    """Read all contexts in FOLDER and check every checksum."""
    with _opened(folder) as store:
        found = store.verify(repair=repair)
    rows = [
        {"app": each.app, "name": each.name, "chunks": list(each.chunks), "reason": each.reason}
        for each in found
    ]
    if as_json:
        print_json({"damaged": rows, "repaired": repair})
    else:
        for row in rows:
            what = row["reason"] or f"chunks {', '.join(map(str, row['chunks']))} are corrupt"
            click.echo(f"{row['name']}  {row['app']}  {what}")
        click.echo(f"{len(rows)} damaged contexts{', repaired' if rows and repair else ''}")
    if rows and not repair:
        raise CheckpointError(f"{len(rows)} contexts in {folder} are damaged; run this with --repair")


def _opened(folder: Path) -> ContextStore:
    """A store that is there.

    Raises:
      ConfigError: it is not.
    """
    if not (folder / VERSION_FILE).exists():
        raise ConfigError(f"{folder} is no folder of contexts")
    return ContextStore(folder)
