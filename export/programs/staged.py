"""Prefills by stage programs on two processors, and decodes by the folder's other programs."""

from collections.abc import Sequence
from typing import Any

from jaxllm.config import WHOLE
from jaxllm.export.programs.executor import Executor
from jaxllm.export.programs.runner import ProgramCache, ProgramRunner
from jaxllm.export.programs.stages import StagePrograms
from jaxllm.export.programs.token_chooser import TokenChooser
from jaxllm.serving.runners.runner import PrefillChunk


class StagedRunner(ProgramRunner):
    """Runner of the whole model that prefills by stages (see `ProgramRunner`).

    A cache is copied to Python's memory once for each prompt, from the programs that decode to the stages
    and back. Prompts shorter than the shortest chunk of stages run on the prefill programs.
    """

    def __init__(
        self, executor: Executor, stages: StagePrograms, token_chooser: TokenChooser | None = None
    ) -> None:
        super().__init__(executor, WHOLE, token_chooser)
        self.stages = stages

    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """See `Runner`; one chunk, whose own chunks the processors share out of order."""
        return [PrefillChunk(tokens=tokens, last=True)]

    def prefill(
        self, cache: ProgramCache, tokens: Sequence[int], at: int, chunk: PrefillChunk
    ) -> tuple[Any, ProgramCache]:
        """See `Runner`."""
        count = len(tokens) - 1
        if count < self.stages.facts.chunk_tokens[0]:
            return super().prefill(cache, tokens, at, chunk)
        rows, _ = self.stages.prefill(tokens[:-1], at, self.rows(cache, at) if at else {})
        caches = self.executor.restored(self.level, cache.capacity_tokens, rows)
        return self.step(cache.after(caches, at + count), tokens[-1], at + count)
