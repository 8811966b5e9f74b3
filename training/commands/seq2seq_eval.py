"""`jaxllm seq2seq-eval`: BLEU of an encoder-decoder, and how often its draft says the same."""

import json
from pathlib import Path

import click


@click.command("seq2seq-eval")
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.option(
    "--source",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A UTF-8 text file, a source per line.",
)
@click.option(
    "--reference",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A UTF-8 text file with the right target of each line.",
)
@click.option(
    "--prefix", metavar="TEXT", help="What tells the model the task.  [default: the model's own prefix]"
)
@click.option(
    "--draft",
    type=click.Path(path_type=Path),
    metavar="DRAFT",
    help="A smaller model of the same tokenizer, whose agreement with MODEL is measured, too.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the translations here."
)
def seq2seq_eval_command(
    model: Path, source: Path, reference: Path, prefix: str | None, draft: Path | None, output: Path | None
) -> None:
    """Translate a file greedily, and print BLEU as a JSON object.

    MODEL and DRAFT are Hugging Face folders or bundles. Agreement is the share of the tokens of MODEL's
    translations that DRAFT finds most likely after those before them.

    \b
    Example:
      jaxllm seq2seq-eval runs/translate/hf --source val.de --reference val.en
    """
    # Here, so that --help and wrong usage do not wait for JAX.
    from jaxllm.errors import ConfigError
    from training.loop.run_files import write_text
    from training.seq2seq.pairs import read_lines
    from training.seq2seq.translation import Translator, bleu

    texts, wanted = (read_lines(path) for path in (source, reference))
    if len(texts) != len(wanted):
        raise ConfigError(f"{source} has {len(texts)} lines and {reference} {len(wanted)}")
    pairs = [pair for pair in zip(texts, wanted, strict=True) if all(pair)]
    if not pairs:
        raise ConfigError(f"{source} and {reference} have no line in common; give texts, one per line")
    translator = Translator.read(model)
    lead = f"{prefix.strip()} " if prefix is not None else translator.tokenizer.files.source_prefix
    sources = translator.encode([lead + text for text, _ in pairs])
    answers = translator.translate(sources)
    said = [translator.tokenizer.decode(answer).strip() for answer in answers]
    found = {"lines": len(pairs), "bleu": round(bleu(said, [text for _, text in pairs]), 2)}
    if draft is not None:
        found["agreement"] = round(Translator.read(draft).agreement(sources, answers), 4)
    if output is not None:
        write_text(output, "".join(f"{text}\n" for text in said))
    click.echo(json.dumps(found))
