"""Answers of several systems to the same prompts, and their figures: times per token, likeness, intervals.

Systems are tuned as they would be in use, on prompts that are not counted. Every system that depends on
numbers which its paper leaves open is treated alike: all candidates answer the same prompts, one after the
other at each prompt. Of those that are about as accurate as the best, the fastest is taken. Systems that give
the target's answers are all alike accurate.

Prompts are held out and ask for answers of some length: of our tasks, or of Spec-Bench (arXiv 2401.07851), a
file of JSON lines, each with a `category` and the `turns` of a conversation, of which the first is asked. The
project has no copy of it.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.bench import silent
from benchmarks.harness.children import in_turns
from benchmarks.harness.machine import Device
from benchmarks.harness.report import OURS, Row, bootstrap, compared, row
from benchmarks.samples import SOURCE_TASKS, chosen_tasks, packaged_examples, read_stories, source_examples
from benchmarks.speculation.systems import BLD, PUBLISHED, STDPL, STI, Opener, Setting
from jaxllm.cli.console import read_text
from jaxllm.errors import ConfigError
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.engine.step import Answer
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.readers import read_chats, read_compression, story_example
from jaxllm.tasks.rouge import rouge
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.prompts import reads_sources
from jaxllm.text.tokenizer import Tokenizer

# Of one system, by task.
Answers = dict[str, list[Answer]]
# Of one system, for each task: milliseconds after the first token of each answer, and tokens after it.
Spent = Sequence[tuple[Sequence[float], Sequence[int]]]
_DRAWS = 2000


def ask(
    engines: Mapping[str, Engine],
    prompts: Mapping[str, Sequence[list[int]]],
    config: GenerationConfig,
    label: str,
    progress: Progress,
) -> dict[str, Answers]:
    """Answers of every system, all systems at one prompt before the next one."""
    found: dict[str, Answers] = {name: {task: [] for task in prompts} for name in engines}
    asked = [(task, each) for task, all_ in prompts.items() for each in all_]
    for number, (task, prompt), name in in_turns(engines, asked):
        found[name][task].append(engines[name].generate(prompt, config))
        progress(label, number + 1, len(asked))
    return found


def token_ms(spent: Spent) -> float:
    """Time per token after the first: over all answers of a task, then the mean over tasks."""
    means = [sum(times) / sum(tokens) for times, tokens in spent if sum(tokens)]
    if not means:
        raise ConfigError("no answer had more than one token; give more prompts, or let answers be longer")
    return float(np.mean(means))


def ratio_interval(ours: Spent, theirs: Spent) -> tuple[float, float]:
    """The middle 95 % of how many times ours is as fast, over prompts of each task drawn with replacement,
    the same ones for both systems (paired bootstrap); with one prompt of each task it is a point."""
    draw = np.random.default_rng(0)
    sums = [np.zeros(_DRAWS), np.zeros(_DRAWS)]
    for pair in zip(ours, theirs, strict=True):
        count = len(pair[0][0])
        if not count:
            continue
        drawn = draw.integers(0, count, (_DRAWS, count))
        tokens = [np.asarray(each)[drawn].sum(1) for _, each in pair]
        for place, (times, _) in enumerate(pair):
            per_token = np.asarray(times)[drawn].sum(1) / np.maximum(tokens[place], 1)
            # A task of which a draw has no token on either side counts for neither.
            sums[place] += np.where((tokens[0] > 0) & (tokens[1] > 0), per_token, 0.0)
    low, high = np.percentile(sums[1] / np.maximum(sums[0], 1e-9), (2.5, 97.5))
    return float(low), float(high)


def agreement(ours: Answers, theirs: Answers) -> float:
    """Share of tokens that are the same at the same place."""
    pairs = [(a.tokens, b.tokens) for task in theirs for a, b in zip(ours[task], theirs[task], strict=True)]
    same = sum(sum(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs)
    return same / max(1, sum(len(b) for _, b in pairs))


def rouge_l(ours: Answers, target: Answers) -> list[float]:
    """Rouge-L (F1) of each answer, the target's own being the right one; 1 where both are the same text.

    LLMCad measures accuracy so (section 4.1).
    """
    pairs = [(a.text, b.text) for task in target for a, b in zip(ours[task], target[task], strict=True)]
    return [1.0 if a == b else rouge([b], a)["rougeL"] for a, b in pairs]


def spent(answers: Answers) -> Spent:
    """What the answers of each task took."""
    return [
        ([one.timings.total_ms - one.timings.ttft_ms for one in each], [len(one.tokens) - 1 for one in each])
        for each in answers.values()
    ]


def own_tasks(data: Path | None) -> dict[str, list[TaskExample]]:
    """The examples of our tasks: stories to continue and to tell, sentences to shorten, chats to sum up."""
    stories = read_stories(data)
    # Of each story the first words are given.
    words = [each for each in (story.split(" ") for story in stories) if len(each) > 40]
    shorten = packaged_examples("shorten") if data is None else read_compression(data, "valid")
    chats = packaged_examples("chat summary") if data is None else read_chats(data, "valid")
    return {
        "story": [
            TaskExample(user=" ".join(each[:20]), answer=" " + " ".join(each[20:]), form="text")
            for each in words
        ],
        "told": [each for each in map(story_example, stories) if each is not None],
        "shorten": list(shorten),
        "chat summary": list(chats),
    }


# The categories of Spec-Bench, of which the others are MT-Bench's.
_SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
_CHAT = "multi-turn conversation"


def spec_bench(file: Path) -> dict[str, list[TaskExample]]:
    """The first turns of Spec-Bench by category; those of MT-Bench are one."""
    found: dict[str, list[TaskExample]] = {_CHAT: [], **{each: [] for each in _SPEC_BENCH}}
    for number, line in enumerate(read_text(file).splitlines()):
        try:
            record = json.loads(line)
            category, turn = record["category"], record["turns"][0]
            example = TaskExample(user=turn, answer="")
        except (ValueError, TypeError, LookupError, AttributeError, ConfigError) as error:
            raise ConfigError(
                f"{file}, line {number + 1}: is no prompt of Spec-Bench, which has a category and turns; "
                "give its question.jsonl"
            ) from error
        found[category if category in _SPEC_BENCH else _CHAT].append(example)
    return found


def read_prompts(
    data: Path | None,
    tokenizer: Tokenizer,
    *,
    count: int,
    most_tokens: int,
    seed: int,
    file: Path | None = None,
) -> dict[str, list[list[int]]]:
    """Token ids of at most `count` prompts of each task, none longer than `most_tokens`.

    Args:
      data: the folder of the tasks' files; None takes the packaged samples.
      tokenizer: of the model that is asked.
      count: of each task; a sample that has fewer gives all of them. Tasks without any are left out.
      file: of Spec-Bench, whose categories are the tasks then; for an encoder-decoder of sources, a line
        each, or what precedes the tab of a pair. None takes `own_tasks`, or the tasks that an
        encoder-decoder's folder names.
    """
    found = {}
    if file is not None:
        if reads_sources(tokenizer):
            sources = (line.split("\t")[0].strip() for line in read_text(file).splitlines())
            by_task = {"sources": [TaskExample(user=each, answer="") for each in sources if each]}
        else:
            by_task = spec_bench(file)
    elif reads_sources(tokenizer):
        names = chosen_tasks(tokenizer)
        by_task = {SOURCE_TASKS[name].called: source_examples(name, data) for name in names}
    else:
        by_task = own_tasks(data)
    for number, (task, examples) in enumerate(by_task.items()):
        order = np.random.default_rng((seed, number)).permutation(len(examples))
        prompts: list[list[int]] = []
        for place in order:
            ids = list(prompt_tokens(tokenizer, examples[place]).ids)
            if len(ids) <= most_tokens:
                prompts.append(ids)
            if len(prompts) == count:
                break
        if prompts:
            found[task] = prompts
    if not found:
        raise ConfigError(f"no prompt of {file or 'the tasks'} has at most {most_tokens} tokens")
    return found


ALL = "all tasks"


def time_rows(case: str, answers: Mapping[str, Answers], notes: Mapping[str, str]) -> list[Row]:
    """Times per token by task and over all tasks: ours beside the others, and LLMCad as published beside it
    without each technique."""
    without = {name for name in answers if name.startswith(f"{PUBLISHED}-")}
    rows = []
    for task in (*next(iter(answers.values())), ALL):
        found = {name: spent(each if task == ALL else {task: each[task]}) for name, each in answers.items()}
        if not all(sum(map(sum, (tokens for _, tokens in each))) for each in found.values()):
            # Answers of one token, such as labels, have no time per token after it.
            continue
        label = f"{case}: {task}"
        noted = notes if task == ALL else {}
        rows += spent_rows(OURS, {name: found[name] for name in found if name not in without}, label, noted)
        if without:
            rows += spent_rows(PUBLISHED, {name: found[name] for name in (PUBLISHED, *without)}, label, noted)
    return rows


def quality_rows(case: str, answers: Mapping[str, Answers]) -> list[Row]:
    """Rouge-L of answers, the target's own being the right ones, of ours and of the systems whose answers
    differ; none where no such system was measured."""
    judged = [name for name in (BLD, STI) if name in answers]
    if not judged:
        return []
    scores = {name: rouge_l(answers[name], answers[STDPL]) for name in (OURS, *judged)}
    notes = {}
    for name, each in scores.items():
        values = np.asarray(each)
        low, high = bootstrap(len(values), lambda drawn, values=values: values[drawn].mean(1))
        same = agreement(answers[name], answers[STDPL])
        notes[name] = f"95 % in [{low:.2f}, {high:.2f}] of {len(each)} prompts; {same:.0%} of tokens the same"
    means = {name: float(np.mean(each)) for name, each in scores.items()}
    return compared(f"{case}: {ALL}", "rouge_l", means, notes)


def draft_rows(engines: Mapping[str, Engine], device: Device, case: str) -> list[Row]:
    """Acceptance of drafts, the share of them that was used, and what a pass's time goes to."""
    rows = []
    for name, engine in engines.items():
        if engine.speculation is None:
            continue
        counts = engine.speculation.counts
        note = (
            f"{counts.verifications} verifications, {counts.plain_tokens} tokens without one; "
            f"{counts.hidden_steps} steps of the draft while the target waited"
        )
        metrics = ("acceptance_length", "useful_share")
        rows += [row(case, metric, getattr(counts, metric), note, system=name) for metric in metrics]
        if not counts.verifications:
            continue
        # Per verification: of drafting before it, and of itself, with what is read meanwhile.
        draft_ms, verify_ms, hidden_ms = (
            1000 * each / counts.verifications for each in (counts.draft_s, counts.verify_s, counts.hidden_s)
        )
        parts = [f"{hidden_ms:.1f} ms of it drafting on"]
        if (streamed := engine.model.streamed) is not None and "pass_bytes" in (facts := streamed.facts()):
            read = f"{facts['pass_bytes'] / 1e6:.1f} MB read"
            if speed := device.storage.bytes_per_s:
                read += f", in {1000 * facts['pass_bytes'] / speed:.1f} ms at least"
            parts.append(read)
        rows.append(row(case, "draft_ms", draft_ms, system=name))
        rows.append(row(case, "verify_ms", verify_ms, "; ".join(parts), system=name))
    return rows


def notes_of(engines: Mapping[str, Engine], device: Device, how: Mapping[str, str]) -> dict[str, str]:
    """How each system ran."""
    notes = {}
    for name, engine in engines.items():
        parts = [device.note] if device.note else []
        if engine.model.streamed is not None:
            facts = engine.model.streamed.facts()
            parts.append(f"{facts['resident_layers']} pieces are resident, {facts['caching']} reads")
        if name in how:
            parts.append(how[name])
        notes[name] = "; ".join(parts)
    return notes


def spent_rows(ours: str, times: Mapping[str, Spent], case: str, notes: Mapping[str, str]) -> list[Row]:
    """Rows of one case; with notes, the interval of each ratio in it, where tasks have several prompts."""
    rows = compared(case, "tpot_ms", {name: token_ms(each) for name, each in times.items()}, notes, ours=ours)
    counts = [len(answers) for answers, _ in times[ours]]
    if not notes or max(counts) < 2:
        return rows

    for place, each in enumerate(rows):
        if each.baseline is not None:
            low, high = ratio_interval(times[ours], times[each.baseline])
            said = f"paired 95 % in [{low:.2f}x, {high:.2f}x] of {sum(counts)} prompts"
            rows[place] = dataclasses.replace(each, note="; ".join(filter(None, (said, each.note))))
    return rows


def fastest(times: Mapping[str, float], quality: Mapping[str, float]) -> str:
    """The fastest candidate of those whose quality is within 0.05 of the best."""
    least = max(quality.values()) - 0.05
    return min((name for name in times if quality[name] >= least), key=lambda name: times[name])


def tuned(
    name: str,
    candidates: Mapping[str, Opener],
    setting: Setting,
    target: Engine,
    prompts: Mapping[str, Sequence[list[int]]],
    config: GenerationConfig,
    progress: Progress = silent,
) -> tuple[Engine, str]:
    """Opens a system as it is best, and says how that is.

    Args:
      candidates: what opens it, by what is tried.
      setting: see `systems`.
      target: whose answers are the right ones.
      prompts: token ids by task; without any, the middle candidate is taken.
    """
    if not any(prompts.values()):
        middle = list(candidates)[len(candidates) // 2]
        return candidates[middle](setting), f"{middle}, not tuned"
    engines = {label: opened(setting) for label, opened in candidates.items()}
    asked = {STDPL: target, **engines}
    answers = ask(asked, prompts, config, f"Tuning {name}", progress)
    times = {label: token_ms(spent(answers[label])) for label in engines}
    quality = {label: float(np.mean(rouge_l(answers[label], answers[STDPL]))) for label in engines}
    best = fastest(times, quality)
    for label, engine in engines.items():
        if label != best:
            engine.close()
    likeness = {name: "" if each == 1 else f" at a Rouge-L of {each:.2f}" for name, each in quality.items()}
    tried = ", ".join(f"{label}: {times[label]:.1f} ms{likeness[label]}" for label in engines)
    count = sum(map(len, prompts.values()))
    return engines[best], f"{best}, the best of these on {count} other prompts ({tried})"
