"""`jaxllm contexts`: what a folder of contexts holds, and whether it is whole."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.kv.recompute import LOST
from serving.console import print_json
from serving.contexts.damage import Damage
from serving.contexts.root import delete_quarantined, quarantined, require_store
from serving.contexts.store import ContextStore


@click.group("contexts")
def contexts_command() -> None:
    """Look into a folder of contexts that outlive calls, and check it."""


@contexts_command.command("list")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--app", help="Only this app's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(folder: Path, app: str | None, as_json: bool) -> None:
    """List the contexts in FOLDER, and what is damaged or cannot be read: then the command fails."""
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
        damaged = [each for each in store.damage() if app in (None, each.app)]
    if as_json:
        facts = [_facts(each) for each in damaged]
        print_json({"contexts": rows, "used_bytes": used, "damaged": facts})
        _require_none(folder, damaged)
        return
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


@contexts_command.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--repair",
    is_flag=True,
    help="Set aside what is proved to be damaged; have damaged chunks computed again. What storage refuses "
    "to give stays as it is.",
)
@click.option("--delete", is_flag=True, help="Delete what was set aside, now and before.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(folder: Path, repair: bool, delete: bool, as_json: bool) -> None:
    """Read all contexts in FOLDER and check every checksum."""
    with _opened(folder) as store:
        found = store.verify(repair=repair)
        if delete:
            delete_quarantined(folder)
        aside = [str(each.relative_to(folder)) for each in quarantined(folder)]
    left = [each for each in found if not repair or not each.proved]
    if as_json:
        print_json({"damaged": [_facts(each) for each in found], "repaired": repair, "set_aside": aside})
    else:
        for each in found:
            click.echo(_line(each))
        repaired = len(found) - len(left)
        click.echo(f"{len(found)} damaged contexts{f', {repaired} repaired' if repaired else ''}")
        if aside:
            click.echo(f"{len(aside)} set aside in {folder / 'quarantine'}; --delete deletes them")
    _require_none(folder, left)


def _facts(damage: Damage) -> dict[str, object]:
    return {**dataclasses.asdict(damage), "chunks": list(damage.chunks)}


def _line(damage: Damage) -> str:
    what = damage.reason or f"chunks {', '.join(map(str, damage.chunks))} are damaged, and computed again"
    aside = f"; set aside as {damage.aside}" if damage.aside else ""
    return f"{damage.name or '-'}  {damage.app}  {what}{aside}"


def _require_none(folder: Path, damaged: Sequence[Damage]) -> None:
    """Raises CheckpointError where something is damaged."""
    if any(each.proved for each in damaged):
        raise CheckpointError(
            f"{len(damaged)} contexts in {folder} are damaged; `jaxllm contexts verify "
            f"{folder} --repair` sets aside what is"
        )
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} contexts in {folder} cannot be read now, and are left as they are; see to what "
            "is named above, and try again"
        )


def _opened(folder: Path) -> ContextStore:
    """A store that is there.

    Raises:
      ConfigError: it is not.
    """
    if not folder.is_dir() or not require_store(folder):
        raise ConfigError(f"{folder} is no folder of contexts")
    return ContextStore(folder)
