"""`jaxllm demo`: the packaged model at work, with its size and speed."""

from typing import Any

import click

from jaxllm.models.decoder import parameter_count
from jaxllm.sampling import Sampling
from serving.commands.generate import summary
from serving.console import print_json, progress_bars
from serving.engine import Engine
from serving.generation import Generation, GenerationConfig

# Not greedy, which makes a model this small repeat itself; seeded, so that a run can be repeated.
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=7)

# Written for this demo; none is from the training text.
PROMPTS = (
    "Once upon a time, there was a little robot who lived in a",
    "Tom and Sue went to the beach. They wanted to",
    'The cat looked at the moon and said, "',
)


@click.command("demo")
@click.option("-n", "--max-tokens", type=int, default=160, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def demo_command(max_tokens: int, as_json: bool) -> None:
    """Continue a few prompts with the packaged model and report its speed."""
    config = GenerationConfig(max_tokens=max_tokens, sampling=SAMPLING)
    with progress_bars() as progress:
        engine = Engine.open(progress=progress)
    millions = parameter_count(engine.cfg) / 1e6
    model = {
        "model": engine.bundle.layout.name,
        "weights": engine.bundle.layout.weights,
        "parameters": parameter_count(engine.cfg),
        "load_ms": round(engine.load_ms, 1),
        "build_ms": round(engine.table.build_ms, 1),
    }
    if as_json:
        answers = [{"prompt": p, **summary(engine.generate(p, config))} for p in PROMPTS]
        print_json({**model, "answers": answers})
        return
    click.echo(
        f"{model['model']}: {millions:.1f} M parameters, {model['weights']} weights. A toy by size: it "
        "writes simple children's stories and knows nothing else.\n"
    )
    for prompt in PROMPTS:
        _show(prompt, engine.stream(prompt, config))


def _show(prompt: str, generation: Generation) -> None:
    click.secho(prompt, bold=True, nl=False)
    for piece in generation:
        click.echo(piece, nl=False)
    facts: dict[str, Any] = summary(generation)
    click.secho(
        f"\n[{facts['completion_tokens']} tokens, first after {facts['ttft_ms']:.1f} ms, then "
        f"{facts['decode_tokens_per_s'] or 0:.0f} tokens/s]\n",
        dim=True,
    )
