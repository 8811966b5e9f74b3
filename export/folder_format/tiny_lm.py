"""Describes the tiny LM among exported programs: meanings of its classes and marks, and its output arrays.

A `tiny_lm_T` program accepts `tokens` `[1, T]` int32 and `mask` `[1, T]` bool, True = a mark or a valid
token. It returns the logits `keep` `[1, T]` of keeping each token, and those of the decision, `model` `[1,
levels]` and `prompt` `[1, prompt ratios]`, all float32 (see `jaxllm.models.tiny_lm`).
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxllm.config import MAX_DIMENSION, WHOLE
from jaxllm.elastic.compression import MARKS
from jaxllm.elastic.slo import marks
from jaxllm.errors import CheckpointError, ProgramError
from jaxllm.export.folder_format.files import require_ints
from jaxllm.text.tokenizer import TokenizerFiles

MASK = "mask"
KEEP, MODEL, PROMPT = "keep", "model", "prompt"
TINY_WEIGHTS, TINY_TOKENIZER = "tiny_lm.safetensors", "tiny_lm_tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyLmFacts:
    """Facts about a tiny LM for a loop.

    Attributes:
      levels: per class of the model, its level in percent, ascending.
      prompt_ratios: per class of the prompt, its share in (0, 1], ascending.
      mark_ids: token ids of `jaxllm.elastic.slo.marks()`.
      row_tokens: tokens of a row in training and in use.
      own_tokenizer: whether it has a tokenizer of its own, `TINY_TOKENIZER`.
    """

    levels: tuple[int, ...]
    prompt_ratios: tuple[float, ...]
    mark_ids: tuple[int, ...]
    row_tokens: int
    own_tokenizer: bool = False

    def __post_init__(self) -> None:
        require_ints("a level of the tiny LM", self.levels, 1, WHOLE)
        require_ints("a mark of the tiny LM", self.mark_ids, 0, MAX_DIMENSION)
        require_ints("a row of the tiny LM", (self.row_tokens,), MARKS + 1, MAX_DIMENSION)
        ratios = all(type(each) in (int, float) and 0 < each <= 1 for each in self.prompt_ratios)
        if not ratios or type(self.own_tokenizer) is not bool:
            raise ValueError("the tiny LM's prompt ratios are no shares, or its tokenizer is no yes or no")
        for each in (self.levels, self.prompt_ratios):
            if not each or list(each) != sorted(set(each)):
                raise ValueError("the classes of the tiny LM are not ascending")
        if not len(self.mark_ids) == len(set(self.mark_ids)) == len(marks()):
            raise ValueError(f"the tiny LM has not {len(marks())} different marks")

    @classmethod
    def from_json(cls, data: Any) -> "TinyLmFacts | None":
        """The facts as the manifest's JSON has them; None for no tiny LM."""
        if data is None:
            return None
        lists = {name: tuple(data[name]) for name in ("levels", "prompt_ratios", "mark_ids")}
        return cls(**{**data, **lists})

    def require_programs(self, tokens: Sequence[int]) -> None:
        """Raises ValueError unless there is a program for full rows; `tokens`: lengths of all, ascending."""
        if not tokens or tokens[-1] != self.row_tokens:
            raise ValueError(f"no program of the tiny LM reads its rows of {self.row_tokens} tokens")


def parse_tokenizer(raw: bytes) -> TokenizerFiles:
    """A tiny LM's own tokenizer.

    Raises:
      ProgramError: it is malformed.
    """
    try:
        return TokenizerFiles.from_json(json.loads(raw))
    except (ValueError, RecursionError, CheckpointError) as error:
        raise ProgramError(f"{TINY_TOKENIZER}: malformed ({error!s:.200}); export the model again") from error
