"""`jaxllm export-run`: writes the best checkpoint of a run as a Hugging Face folder."""

from pathlib import Path

import click

from training.commands.shared_options import set_devices


@click.command("export-run")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
def export_run_command(run_dir: Path) -> None:
    """Write the best checkpoint of a run as a Hugging Face folder.

    Reads RUN, the folder of `jaxllm pretrain` or `jaxllm seq2seq`, which may still be training in another
    process, takes the checkpoint with the lowest held-out loss so far, and writes RUN/hf.

    \b
    Example:
      jaxllm export-run runs/mine
    """
    # Here, so that --help and wrong usage do not wait for JAX and orbax.
    from training.loop.run_files import read_identity
    from training.pretrain.run import export_best
    from training.seq2seq.run import export_best_seq2seq

    set_devices(None)
    # What a run learns from says of which command it is.
    export = export_best_seq2seq if "pairs" in read_identity(run_dir) else export_best
    click.echo(export(run_dir))
