"""The `elasticize` command: `jaxllm elasticize ...`."""

import dataclasses
import json
from pathlib import Path

import click

from jaxllm.bundle import WEIGHT_FORMATS
from training.cli import device_options, set_devices


@click.command("elasticize")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The bundle's path.")
@click.option("--recipe", "recipe_name", default="family", show_default=True, help="A name, or a .toml file.")
@click.option("--data", type=click.Path(path_type=Path), help="The folder that the recipe's sources are in.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A UTF-8 text file to learn from instead of the recipe's sources; may be repeated.",
)
@click.option("--run", "run_dir", required=True, type=click.Path(path_type=Path), help="The run's folder.")
@click.option(
    "--weights",
    type=click.Choice(WEIGHT_FORMATS),
    help="Width of the bundle's matrices.  [default: the checkpoint's own]",
)
@click.option("--levels", metavar="N,N,...", help="In percent, ascending.  [default: the recipe's]")
@click.option(
    "--recovery",
    type=click.Choice(["lora", "joint", "none"]),
    help="An adapter per level (as in the recipe `adapters`), all levels' weights together, or neither.  "
    "[default: the recipe's]",
)
@click.option(
    "--order",
    type=click.Choice(["importance", "magnitude", "random"]),
    help="Of units; the others are to compare with.  [default: the recipe's]",
)
@click.option(
    "--anchors", "anchor_share", type=float, help="Share of layers to keep whole.  [default: the recipe's]"
)
@click.option("--steps", type=click.IntRange(min=1), help="Of each training.  [default: the recipe's]")
@click.option(
    "--tlm", "tlm_name", default="small", show_default=True, help="The tiny LM's recipe, or none for none."
)
@click.option(
    "--encoder", type=click.Path(path_type=Path), help="A MobileBERT folder for the tiny LM to start from."
)
@click.option("--name", default="", help="The model's name, for people.  [default: the folder's own]")
@device_options
def elasticize_command(
    model: Path,
    out: Path,
    recipe_name: str,
    data: Path | None,
    texts: tuple[Path, ...],
    run_dir: Path,
    weights: str | None,
    levels: str | None,
    recovery: str | None,
    order: str | None,
    anchor_share: float | None,
    steps: int | None,
    tlm_name: str,
    encoder: Path | None,
    name: str,
    mesh: str | None,
    devices: int | None,
) -> None:
    """Make an elastic bundle of the Hugging Face folder MODEL.

    Measures what its units matter on the recipe's text, orders them, makes up for what each level lacks, and
    trains the tiny LM that plans requests. The same command on the same folder resumes. Prints a JSON object
    with the loss of each level.
    """
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.elastic_recipe import load_elastic_recipe
    from training.elasticize import elasticize
    from training.parallel import MeshShape
    from training.recipe import Source
    from training.tlm_recipe import load_tlm_recipe

    recipe = load_elastic_recipe(recipe_name)
    changes = {
        "levels": None if levels is None else _percentages(levels),
        "recovery": recovery,
        "order": order,
        "anchor_share": anchor_share,
        "steps": steps,
        "sources": tuple(Source(text=str(path.absolute())) for path in texts) or None,
    }
    recipe = dataclasses.replace(recipe, **{key: each for key, each in changes.items() if each is not None})
    set_devices(devices)
    facts = elasticize(
        recipe,
        model,
        out,
        run_dir,
        data=data,
        weights=weights,  # pyright: ignore[reportArgumentType]: one of the choices
        name=name,
        tlm=None if tlm_name == "none" else load_tlm_recipe(tlm_name),
        encoder=encoder,
        mesh_shape=MeshShape.parse(mesh or ""),
    )
    click.echo(json.dumps({"bundle": str(out), **facts}))


def _percentages(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is no list of whole percentages", param_hint="--levels"
        ) from error
