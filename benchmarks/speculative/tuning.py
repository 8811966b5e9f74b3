"""Tunes baselines and ablations as they would be in use, on prompts that are not counted.

Every system that depends on numbers which its paper leaves open is treated alike: all candidates answer the
same prompts, one after the other at each prompt. Of those that are about as accurate as the best, the fastest
is taken. Systems that give the target's answers are all alike accurate.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.speculative.answers import ask, rouge_l, spent, token_ms
from benchmarks.speculative.systems import STDPL, Opener, Setting
from serving.engine import Engine
from serving.host.progress import Progress
from serving.request import GenerationConfig

# A candidate may be so much less accurate than the best one, in Rouge-L.
_TOLERANCE = 0.05


def fastest(times: Mapping[str, float], quality: Mapping[str, float]) -> str:
    """The fastest candidate of those whose quality is within a tolerance of the best.

    Args:
      times: of each candidate, the less the better.
      quality: Rouge-L of each candidate.
    """
    least = max(quality.values()) - _TOLERANCE
    return min((name for name in times if quality[name] >= least), key=lambda name: times[name])


def tuned(
    name: str,
    candidates: Mapping[str, Opener],
    setting: Setting,
    target: Engine,
    prompts: Mapping[str, Sequence[list[int]]],
    config: GenerationConfig,
    progress: Progress | None = None,
) -> tuple[Engine, str]:
    """Opens a system as it is best, and says how that is.

    Args:
      name: of the system.
      candidates: what opens it, by what is tried.
      setting: see `systems`.
      target: whose answers are the right ones.
      prompts: token ids by task; without any, the middle candidate is taken.
      config: of each answer.
      progress: see `answers.ask`.
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
    tried = ", ".join(f"{label}: {_said(times[label], quality[label])}" for label in engines)
    count = sum(map(len, prompts.values()))
    return engines[best], f"{best}, the best of these on {count} other prompts ({tried})"


def _said(took_ms: float, quality: float) -> str:
    return f"{took_ms:.1f} ms" if quality == 1 else f"{took_ms:.1f} ms at a Rouge-L of {quality:.2f}"
