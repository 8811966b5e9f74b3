"""`jaxllm bench prefill`: integer prefill."""

import dataclasses
from pathlib import Path

from benchmarks.harness.options import (
    DENSE_SHAPES,
    ModelOrShape,
    Reporting,
    benchmark,
    data_option,
    parts_without,
)
from benchmarks.int8_prefill import PARTS
from jaxllm.cli.console import progress_bars


@benchmark("prefill", "draft", data_option, shapes=DENSE_SHAPES, parts=PARTS)
def prefill_command(
    subject: ModelOrShape, data: Path | None, parts: tuple[str, ...], report: Reporting
) -> None:
    """Measure the speed and the loss of integer prefill.

    Runs prompts on one processor and on two, and compares the loss of a trained model with that of other
    quantizers of activations. The order of subgraphs is simulated on a phone, too.

    \b
    Example:
      jaxllm bench prefill
      jaxllm bench prefill --shape 110m --only two-processors
    """
    from benchmarks.int8_prefill import run

    plan = run.Plan.quick(tasks=data is not None) if report.quick else run.Plan()
    if subject.shape is not None:
        parts = parts_without(parts, ("accuracy", "pruning"), "random weights have none")
    plan = dataclasses.replace(plan, parts=parts)
    with progress_bars() as progress:
        rows = run.run(subject.model, subject.shape, data, plan, progress)
    report.emit("prefill", rows)
