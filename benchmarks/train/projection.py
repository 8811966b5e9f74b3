"""Projects what ELMS's whole preparation of a large model takes on a device: operations by stage, over a
share of the device's peak, assumed or measured.

Operations are those of the model (see `step_flops_per_token`). The assumed shares are of what a device
computes, with what is computed again in the backward pass; measured ones, from `python -m
benchmarks.train --out`, are of the model's operations alone and so contain that already.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.models import shape
from benchmarks.train.steps import SIZES
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.elastic.ladder import LEVELS
from jaxllm.elastic.slo import PROMPT_RATIOS
from jaxllm.training.loop.dry_run import ASSUMED_UTILIZATION, known_figures, recomputed_share
from jaxllm.training.loop.hardware import step_flops_per_token

MODELS: Mapping[str, ModelConfig] = {
    # The model of the paper's figure of 68.3 hours.
    "llama-7b": shape(D=4096, L=32, N=32, K=32, H=128, F=11008),
    "llama-3.1-8b": SIZES["8b"].cfg,
}
ROW_TOKENS = 4096
# Of many short rows, whose prompts differ at every level and ratio.
LABEL_UTILIZATION = 0.2


# How much of everything a preparation takes, as in the paper (sections 3.2 and 3.3), and of what it does not
# say ours. Of importance, ours (recipe `large`).
CALIBRATION_TOKENS = 262_144
# That each level's adapter is trained on: Alpaca-cleaned.
RECOVERY_TOKENS = 50_000_000
# Of labels: MMLU-Pro's test split; tokens of a question and of all of its options are ours.
QUESTIONS, PROMPT_TOKENS, OPTION_TOKENS = 12_032, 300, 100
# Of the score head, and how often they are seen: MeetingBank, ten epochs as LLMLingua-2.
SCORE_TOKENS = 10 * 50_000_000
# MobileBERT's, and the heads'.
TINY_LM_PARAMETERS = 40_000_000


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage: operations of the model, the share of the peak, and what that share is from."""

    name: str
    flops: float
    utilization: float
    measured: bool

    def hours(self, peak: float) -> float:
        """On one device of a peak in operations per second."""
        return self.flops / (peak * self.utilization) / 3600


def stages(cfg: ModelConfig, measured: Mapping[str, float] | None = None) -> list[Stage]:
    """The stages of a preparation by adapters, as in the paper.

    Args:
      measured: shares of the peak, by the stages' kinds "importance" and "lora", from `measured_shares`.
    """
    whole = step_flops_per_token(cfg, ROW_TOKENS)
    adapter = step_flops_per_token(cfg, ROW_TOKENS, adapter=True)
    smaller = [level / FULL_LEVEL for level in LEVELS if level < FULL_LEVEL]
    # A backward pass, and the loss of the whole model and without each layer.
    importance = CALIBRATION_TOKENS * whole * (1 + (cfg.layers + 1) / 3)
    recovery = RECOVERY_TOKENS * adapter * len(smaller)
    # Labels are of sub-models cut to their level, each prompt at every length, with its options.
    per_question = sum(ratio * PROMPT_TOKENS + OPTION_TOKENS for ratio in PROMPT_RATIOS)
    labels = QUESTIONS * per_question * (whole / 3) * (sum(smaller) + 1)
    score = SCORE_TOKENS * 6.0 * TINY_LM_PARAMETERS

    def stage(name: str, kind: str, flops: float, forward: float) -> Stage:
        if measured is not None and kind in measured:
            return Stage(name, flops, measured[kind], True)
        return Stage(name, flops, ASSUMED_UTILIZATION / (1 + recomputed_share("full", forward)), False)

    return [
        stage("importance of units and layers", "importance", importance, 1 / 3),
        stage(f"recovery: adapters of {len(smaller)} levels", "lora", recovery, 1 / 2),
        Stage("answers of all levels to questions (labels)", labels, LABEL_UTILIZATION, False),
        Stage("the tiny LM", score, LABEL_UTILIZATION, False),
    ]


def measured_shares(lines: Iterable[str]) -> dict[str, float]:
    """Shares of the peak by kind ("importance", "lora") in the rows that `python -m
    benchmarks.train` wrote; of several the last counts."""
    rows = [json.loads(line) for line in lines]
    found = {}
    for row in rows:
        kind = str(row["case"]).split(" ")[0]
        if row.get("metric") == "mfu" and kind in ("importance", "lora"):
            found[kind] = float(row["value"])
    return found


def as_markdown(found: Sequence[Stage], devices: Sequence[str]) -> str:
    """The stages in Markdown, a row each, with hours of one device of each kind."""
    figures = [known_figures(device) for device in devices]
    lines = [
        "| stage | 10^18 operations | share of the peak | " + " | ".join(name for name, _ in figures) + " |",
        "|---" * (3 + len(figures)) + "|",
    ]
    for stage in found:
        share = f"{100 * stage.utilization:.0f} % ({'measured' if stage.measured else 'assumed'})"
        hours = (f"{stage.hours(device.flops):.2f} h" for _, device in figures)
        lines.append(f"| {stage.name} | {stage.flops / 1e18:.2f} | {share} | {' | '.join(hours)} |")
    sums = (f"{sum(stage.hours(device.flops) for stage in found):.1f} h" for _, device in figures)
    whole = sum(stage.flops for stage in found) / 1e18
    lines.append(f"| all | {whole:.2f} | | {' | '.join(sums)} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    """Prints the stages of a model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.projection")
    parser.add_argument("model", choices=MODELS, help="the model to prepare")
    parser.add_argument("--device", action="append", metavar="NAME", help="such as H100; repeatable")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what benchmarks.train --out wrote")
    given = parser.parse_args(words)
    lines = [] if given.measured is None else given.measured.read_text(encoding="utf-8").splitlines()
    found = stages(MODELS[given.model], measured_shares(lines))
    print(as_markdown(found, given.device or ["A40", "H100"]))


if __name__ == "__main__":
    main(sys.argv[1:])
