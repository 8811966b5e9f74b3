"""`jaxllm contexts`: lists, checks and repairs contexts that are stored on disk."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jaxllm.cli.console import print_json
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.shared_options import json_option, path_argument, path_option
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.options import combined

if TYPE_CHECKING:
    from jaxllm.serving.contexts.catalog import Damage
    from jaxllm.serving.contexts.store import ContextStore

_folder_argument = path_argument("folder")
_store_options = combined(
    _folder_argument,
    path_option(
        "--keys",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="DIR",
        help="The folder of keys of encrypted contexts.  [default: contexts are not encrypted]",
    ),
    json_option,
)


@click.group("contexts")
def contexts_command() -> None:
    """List, check and repair contexts that are stored on disk.

    FOLDER is the service's folder of contexts.
    """


@contexts_command.command("list", cls=EngineCommand)
@_store_options
@click.option("--app", metavar="NAME", help="List only this app's contexts.")
def list_command(folder: Path, app: str | None, keys: Path | None, as_json: bool) -> None:
    """List the contexts in FOLDER.

    Damaged or unreadable contexts are listed, too; the exit code is 1 then.

    \b
    Example:
      jaxllm contexts list DIR --app mail
    """
    from jaxllm.contexts.recompute import LOST

    with _opened(folder, keys) as store:
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
        damaged = [each for each in store.damage() if app in (None, each.app)]
    if as_json:
        print_json({"contexts": rows, "used_bytes": used, "damaged": [*map(dataclasses.asdict, damaged)]})
    else:
        for row in rows:
            pinned = ", pinned" if row["pinned"] else ""
            click.echo(
                f"{row['name']}  {row['app']}  {row['tokens']} tokens at level {row['level']}, "
                f"{row['chunks']} chunks by {row['codec']}{pinned}"
            )
        for each in damaged:
            click.echo(_line(each))
        click.echo(f"{len(rows)} contexts, {used:,} bytes")
    _require_none(folder, damaged)


@contexts_command.command("verify", cls=EngineCommand)
@_store_options
def verify_command(folder: Path, keys: Path | None, as_json: bool) -> None:
    """Read all contexts in FOLDER and check every checksum.

    Changes nothing; exits with 1 if something is damaged.

    \b
    Example:
      jaxllm contexts verify DIR
    """
    _verify(folder, keys, repair=False, as_json=as_json)


@contexts_command.command("repair", cls=EngineCommand)
@_store_options
def repair_command(folder: Path, keys: Path | None, as_json: bool) -> None:
    """Set damaged files in FOLDER aside.

    Moves them into FOLDER/quarantine, where `jaxllm contexts purge` deletes them; damaged chunks are
    recomputed when their context is called. Unreadable files are left in place.

    \b
    Example:
      jaxllm contexts repair DIR
    """
    _verify(folder, keys, repair=True, as_json=as_json)


@contexts_command.command("purge", cls=EngineCommand)
@_folder_argument
@json_option
def purge_command(folder: Path, as_json: bool) -> None:
    """Delete the files that repairs have set aside in FOLDER.

    Keeps files whose names are not those of the store's files, and exits with 1 then.

    \b
    Example:
      jaxllm contexts purge DIR
    """
    from jaxllm.serving.contexts.layout import delete_quarantined, quarantined

    with _opened(folder):
        aside = quarantined(folder)
        left = delete_quarantined(folder)
    deleted = [str(each.relative_to(folder)) for each in aside if each not in left]
    names = [str(each.relative_to(folder)) for each in left]
    if as_json:
        print_json({"deleted": deleted, "left": names})
    else:
        click.echo(f"{len(deleted)} deleted")
    if left:
        raise CheckpointError(
            f"{len(left)} stay in {folder}, for they hold files of other names: {', '.join(names)}; look at "
            "them and remove them yourself"
        )


def _verify(folder: Path, keys: Path | None, *, repair: bool, as_json: bool) -> None:
    from jaxllm.serving.contexts.layout import quarantined

    with _opened(folder, keys) as store:
        found = store.verify(repair=repair)
        aside = [str(each.relative_to(folder)) for each in quarantined(folder)]
    left = [each for each in found if not repair or not each.proved]
    if as_json:
        print_json({"damaged": [*map(dataclasses.asdict, found)], "repaired": repair, "set_aside": aside})
    else:
        for each in found:
            click.echo(_line(each))
        repaired = len(found) - len(left)
        click.echo(f"{len(found)} damaged contexts{f', {repaired} repaired' if repaired else ''}")
        if aside:
            click.echo(
                f"{len(aside)} set aside in {folder / 'quarantine'}; `jaxllm contexts purge {folder}` "
                "deletes them"
            )
    _require_none(folder, left)


def _line(damage: "Damage") -> str:
    what = damage.reason or f"chunks {', '.join(map(str, damage.chunks))} are damaged, and computed again"
    aside = f"; set aside as {damage.aside}" if damage.aside else ""
    return f"{damage.name or '-'}  {damage.app}  {what}{aside}"


def _require_none(folder: Path, damaged: "Sequence[Damage]") -> None:
    """Raises CheckpointError where something is damaged."""
    if damaged:
        what = (
            "cannot be read now, and stay as they are; remove the causes that are listed above, and try again"
        )
        if any(each.proved for each in damaged):
            what = f"are damaged; `jaxllm contexts repair {folder}` sets them aside"
        raise CheckpointError(f"{len(damaged)} contexts in {folder} {what}")


def _opened(folder: Path, keys: Path | None = None) -> "ContextStore":
    """Opens an existing store."""
    from jaxllm.serving.contexts.catalog import require_store
    from jaxllm.serving.contexts.store import ContextStore

    if not folder.is_dir() or not require_store(folder):
        raise ConfigError(f"{folder} is not a folder of contexts")
    return ContextStore(folder, keys=keys)
