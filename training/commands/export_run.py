"""`jaxllm export-run`: writes the best checkpoint of a pretraining run as a Hugging Face folder."""

from pathlib import Path

import click

from training.commands.shared_options import set_devices


@click.command("export-run")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
def export_run_command(run_dir: Path) -> None:
    """Write the best checkpoint of a pretraining run as a Hugging Face folder.

    Reads RUN, the folder of `jaxllm pretrain`, which may still be training in another process, takes the
    checkpoint with the lowest held-out loss so far, and writes RUN/hf.

    \b
    Example:
      jaxllm export-run runs/mine
    """
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.pretrain.run import export_best

    set_devices(None)
    click.echo(export_best(run_dir))
