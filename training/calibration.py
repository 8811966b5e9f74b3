"""Begins and ends calibrations: their recipes, measured texts, and the bundles they write.

`jaxllm calibrate prefill|contexts|nested|experts` runs them. Importing this module imports no JAX, so that
command lines can define their options by the recipes.
"""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.formats import EXPERT_BITS, WeightFormat
from jaxllm.int8_prefill.recipe import ShadowRecipe
from jaxllm.layer_configs import require_int
from jaxllm.options import option
from jaxllm.training.settings import Recipe

if TYPE_CHECKING:
    from jaxllm.bundle import Bundle

# On less text than this, chance decides which experts and channels matter.
LEAST_TOKENS = 2048
_LONGEST_CHUNK_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillRecipe(Recipe):
    """Sizes of a calibration of integer prefill, and how it quantizes.

    Attributes:
      shadow: settings that separate outliers from other activations.
    """

    tokens: int = option(8192, "Tokens of text to calibrate on, and as many to hold out.", low=LEAST_TOKENS)
    row_tokens: int = option(256, "Longest context.", low=2)
    shadow: ShadowRecipe = dataclasses.field(default_factory=ShadowRecipe)
    weight_scales: Literal["channel", "tensor"] = option(
        "channel",
        "Quantize a weight with a scale for each output channel, or with one for all, the only form on "
        "some integer processors.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextRecipe(Recipe):
    """Sizes of a calibration of contexts."""

    tokens: int = option(2048, "Tokens to measure on.", low=1)
    row_tokens: int = option(512, "Longest context.", low=1)
    sensitivity_rows: int = option(
        2, "Contexts on which sensitivities are measured, by a forward pass per layer.", low=1
    )
    chunk_tokens: tuple[int, ...] = option(
        (16, 32, 64),
        "Length of chunks to choose from: longer ones share scales among more tokens. Repeatable.",
        low=1,
        high=_LONGEST_CHUNK_TOKENS,
        entries=1,
    )
    ratio: float = option(
        0.5,
        "Bytes at which codecs are compared, scales included, relative to chunks of 16 tokens at 8 bits.",
        above=0,
        high=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = max(self.chunk_tokens)
        if any(longest % each for each in self.chunk_tokens):
            raise ConfigError(f"lengths of chunks must divide the longest, got {self.chunk_tokens}")
        if min(self.tokens, self.row_tokens) < 2 * longest:
            raise ConfigError(
                f"measure on contexts of at least two chunks, {2 * longest} tokens, got tokens {self.tokens} "
                f"and row_tokens {self.row_tokens}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NestedRecipe(Recipe):
    """Sizes of a calibration of nested weights."""

    tokens: int = option(16384, "Tokens to calibrate on, an eighth of them held out.", low=1)
    row_tokens: int = option(512, "Longest context.", low=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertWidthsRecipe(Recipe):
    """Sizes of a measurement of a mixture's experts."""

    tokens: int = option(
        8192, "Tokens of text, or of targets, to measure on, and as many to hold out.", low=1
    )
    row_tokens: int = option(256, "Longest context.", low=2)
    batch: int = option(4, "Rows that are computed together.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("tokens", self.tokens, LEAST_TOKENS)


# What a loss is a loss of: the perplexity of the targets, or Rouge-2 of the model's answers.
MEASURES = ("perplexity", "rouge2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairWidthsRecipe(Recipe):
    """Sizes of a measurement of an encoder-decoder's experts, on pairs."""

    tokens: int = option(8192, "Tokens of targets to measure on, and as many to hold out.", low=1)
    batch_tokens: int = option(2048, "Tokens of either side that are computed together.", low=1)
    answer_tokens: int = option(100, "Most tokens of an answer that Rouge-2 judges.", low=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("tokens", self.tokens, LEAST_TOKENS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WidthTarget:
    """Bounds of the widths of experts.

    Attributes:
      most_loss: tolerable growth of the perplexity, or loss of Rouge-2, as a share.
      uniform: one width for all experts, of `EXPERT_BITS`, instead of a search; 0 searches.
    """

    most_loss: float = 0.05
    uniform: int = 0

    def __post_init__(self) -> None:
        if self.uniform and self.uniform not in EXPERT_BITS:
            raise ConfigError(f"experts have a width among {EXPERT_BITS}, got {self.uniform}")


SEARCHED = WidthTarget()


@dataclasses.dataclass(frozen=True)
class BundleOutput:
    """Bundle that a job writes atomically.

    Attributes:
      weights: width of the matrices; None for the checkpoint's own.
      name: display name of the model; its own by default.
      kit: path of the kit to write as well (see `jaxllm.bundle.kit`); None for none.

    Raises:
      CheckpointError: the folder of the file does not exist.
    """

    path: Path
    weights: WeightFormat | None = None
    name: str = ""
    kit: Path | None = None

    def __post_init__(self) -> None:
        if not (folder := Path(self.path).parent).is_dir():
            raise CheckpointError(f"{folder}: no such folder; create it first")


@contextlib.contextmanager
def bundle_of(model: Path, weights: WeightFormat | None, name: str = "") -> "Iterator[Bundle]":
    """Opens a bundle, or converts a Hugging Face folder or GGUF file to a temporary one, removed at the end.

    Args:
      model: path of the bundle, folder or GGUF file.
      weights: width of a folder's or GGUF file's matrices; None for their own.
      name: display name of the model; its own by default.

    Raises:
      CheckpointError: the model cannot be read.
    """
    from jaxllm.bundle import Bundle
    from jaxllm.checkpoints.gguf_file import is_checkpoint
    from jaxllm.prepare import prepare

    if not model.exists():
        raise CheckpointError(
            f"{model}: no such file or folder; give a Hugging Face folder, a GGUF file or a bundle"
        )
    with tempfile.TemporaryDirectory() as scratch:
        path = model
        if is_checkpoint(model):
            path = Path(scratch) / "model.jaxllm"
            prepare(model, path, weights=weights, name=name)
        with Bundle.open(path) as bundle:
            yield bundle


def text_tokens(bundle: "Bundle", count: int, paths: Sequence[Path]) -> list[int]:
    """Returns the first `count` tokens of concatenated texts, or all.

    Args:
      paths: files; Python's language reference if empty.

    Raises:
      ConfigError: a file cannot be read.
    """
    from jaxllm.text.builtin_texts import builtin_texts
    from jaxllm.text.tokenizer import Tokenizer
    from jaxllm.training.data.documents import read_texts, text_document
    from jaxllm.training.data.encoders import ModelEncoder

    # Alternates between several files, so that none is left out, however long the first is.
    texts = itertools.chain.from_iterable(itertools.zip_longest(*map(read_texts, paths)))
    documents = [text_document(text) for text in texts if text]
    documents = documents or [text_document(text) for text in builtin_texts()]
    encoder = ModelEncoder(Tokenizer(bundle.tokenizer_files()))
    tokens: list[int] = []
    for document in documents:
        if len(tokens) >= count:
            break
        tokens += encoder.encode([document])[0][0]
    return tokens[:count]
