"""Describes a tiny LM's training: one frozen value, read from TOML."""

import dataclasses
from pathlib import Path

from jaxllm.config import FULL_LEVEL
from jaxllm.elastic.ladder import LEVELS
from jaxllm.elastic.slo import PROMPT_RATIOS
from jaxllm.errors import ConfigError
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.options import option
from jaxllm.tasks import find_task
from jaxllm.training.settings import Recipe, TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyLmRecipe(Recipe):
    """Recipe of a tiny LM's score head, then its decision head. The options' help describes it.

    Attributes:
      score, decide: settings of each head's training; `row_tokens`, equal in both, is the length of a
        prompt's rows in service, too.
      encoder: encoder to train from random weights, with the vocabulary of the model's tokenizer; None if
        the run starts from a MobileBERT folder.
    """

    folder = "tiny_lm"

    score: TrainSettings
    decide: TrainSettings
    encoder: EncoderConfig | None = None
    shared_layers: int = option(help="Number of the encoder's layers that both heads share.", low=0)
    levels: tuple[int, ...] = option(
        LEVELS, "Levels that the decision chooses among.", low=1, high=FULL_LEVEL, entries=1, ascending=True
    )
    prompt_ratios: tuple[float, ...] = option(
        PROMPT_RATIOS,
        "Shares of a prompt that the decision chooses among.",
        above=0,
        high=1,
        entries=1,
        ascending=True,
    )
    compressions: tuple[str, ...] = option(
        help="Files of texts with shorter versions, under the folder of all data.", entries=1
    )
    instructions: tuple[str, ...] = option(("",), "System turns of the texts; an empty one is none.")
    tasks: tuple[str, ...] = option(
        help="Names in `jaxllm.tasks.TASKS`, with options, whose training splits are asked.",
        entries=1,
    )
    questions: int = option(300, "Most questions of each task that decisions learn from.", low=2)
    used_questions: int = option(
        0,
        "Most questions of each task from which the score head learns the words that the elastic model uses "
        "(see `labels`); 0 for none.",
        low=0,
    )
    used_weight: float = option(
        1.0, "Weight of the loss on their tokens; that on tokens of shortened texts is 1.", low=0, high=1000
    )
    held_out_share: float = option(
        0.05,
        "Share of texts and questions that is not trained on and picks the best checkpoints.",
        above=0,
        below=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score.row_tokens != self.decide.row_tokens:
            raise ConfigError(
                f"both heads read the same rows: row_tokens of score ({self.score.row_tokens}) and of decide "
                f"({self.decide.row_tokens}) must be equal"
            )
        for name in self.tasks:
            if find_task(name).score != "accuracy":
                raise ConfigError(f"the task {name} has no options to compare; leave it out")


@dataclasses.dataclass(frozen=True)
class TinyLmRun:
    """Training of a tiny LM as a part of that of an elastic model.

    Attributes:
      recipe: recipe of the training; its levels are the elastic model's.
      encoder: MobileBERT folder to start from; None starts from random parameters.
    """

    recipe: TinyLmRecipe
    encoder: Path | None = None
