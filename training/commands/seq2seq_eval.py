"""`jaxllm seq2seq-eval`: how good an encoder-decoder's answers are, and how often its draft says the same."""

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
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A UTF-8 text file with the right target of each line.",
)
@click.option(
    "--fields",
    nargs=2,
    metavar="SOURCE TARGET",
    help="Read the source file as JSON lines, from these fields; a list of targets is of several right ones.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Of JSON lines take those alone that a recipe with this held_out_share does not train on.",
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
    model: Path,
    source: Path,
    reference: Path | None,
    fields: tuple[str, str] | None,
    held_out: float | None,
    prefix: str | None,
    draft: Path | None,
    output: Path | None,
) -> None:
    """Answer a file greedily, and print how good the answers are as a JSON object.

    MODEL and DRAFT are Hugging Face folders or bundles. Answers to text files are judged by BLEU, those to
    JSON lines by Rouge and by the share that is right to the letter. Agreement is the share of the tokens
    of MODEL's answers that DRAFT finds most likely after those before them.

    \b
    Example:
      jaxllm seq2seq-eval runs/translate/hf --source val.de --reference val.en
      jaxllm seq2seq-eval runs/switch/hf --prefix "emotion:" --source valid.jsonl --fields text label
    """
    # Here, so that --help and wrong usage do not wait for JAX.
    from jaxllm.errors import ConfigError
    from jaxllm.tasks.rouge import require_rouge
    from training.loop.run_files import write_text
    from training.seq2seq.pairs import held_out_of, read_json_pairs, read_pair_files
    from training.seq2seq.translation import Translator, bleu, likeness

    if (reference is None) == (fields is None):
        raise click.UsageError("give --reference with text files, or --fields with JSON lines")
    if held_out is not None and fields is None:
        raise click.UsageError("--held-out is for JSON lines: give --fields")
    if reference is not None:
        pairs = [(text, [right]) for text, right in read_pair_files(source, reference).texts]
    else:
        assert fields is not None
        require_rouge()
        pairs = read_json_pairs(source, *fields)
        if held_out is not None:
            pairs = held_out_of(pairs, held_out)
    if not pairs:
        raise ConfigError(f"{source} has no source with a target; give texts, one per line")
    translator = Translator.read(model)
    lead = f"{prefix.strip()} " if prefix is not None else translator.tokenizer.files.source_prefix
    sources = translator.encode([lead + text for text, _ in pairs])
    answers = translator.translate(sources)
    said = [translator.tokenizer.decode(answer).strip() for answer in answers]
    found: dict[str, float] = {"lines": len(pairs)}
    if reference is not None:
        found["bleu"] = round(bleu(said, [right[0] for _, right in pairs]), 2)
    else:
        found.update(likeness(said, [right for _, right in pairs]))
    if draft is not None:
        found["agreement"] = round(Translator.read(draft).agreement(sources, answers), 4)
    if output is not None:
        write_text(output, "".join(f"{text}\n" for text in said))
    click.echo(json.dumps(found))
