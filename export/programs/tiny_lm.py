"""Plans by the tiny LM of a folder of programs. Imports no JAX."""

import dataclasses
from pathlib import Path

import numpy as np

from jaxllm.config import WHOLE
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.tiny_lm import KEEP, MODEL, PROMPT, TINY_TOKENIZER, parse_tokenizer
from jaxllm.export.programs.executor import Executor
from jaxllm.text.tokenizer import TokenizerFiles

_MAX_TOKENIZER_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTinyLm:
    """The classes and the tokens of a folder's tiny LM (see
    `jaxllm.serving.elastic.tiny_proposer.TinyClasses`)."""

    levels: tuple[int, ...]
    prompt_ratios: tuple[float, ...]
    mark_ids: tuple[int, ...]
    row_tokens: int
    tokenizer: TokenizerFiles | None


def read_tiny_lm(manifest: Manifest, folder: Path) -> ProgramTinyLm | None:
    """Reads the classes and the tokens of a folder's tiny LM; None if it has none.

    Raises:
      ProgramError: its tokenizer is malformed.
    """
    facts = manifest.tiny_lm
    if facts is None:
        return None
    files = None
    if facts.own_tokenizer:
        files = parse_tokenizer(manifest.read_intact(folder, TINY_TOKENIZER, most_bytes=_MAX_TOKENIZER_BYTES))
    return ProgramTinyLm(
        levels=facts.levels,
        prompt_ratios=facts.prompt_ratios,
        mark_ids=facts.mark_ids,
        row_tokens=facts.row_tokens,
        tokenizer=files,
    )


class TinyLmPrograms:
    """Runs the programs of a tiny LM (see `jaxllm.serving.elastic.tiny_proposer.TinyProposer`).

    Attributes:
      lengths: lengths of rows that there are programs for, ascending.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self.lengths = executor, executor.manifest.tiny_lm_tokens()

    def run(self, row: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads a row `[1, T]` int32 with its mask `[1, T]` bool; T is one of `lengths`."""
        manifest = self._executor.manifest
        signature = manifest.signature("tiny_lm", row.shape[1], WHOLE, manifest.context_tokens)
        out = self._executor.run_tiny_lm(signature, row, mask)
        return out[KEEP], out[MODEL], out[PROMPT]
