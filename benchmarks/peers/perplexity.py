"""Computes the perplexity of every system on the same token ids, to compare the quality of formats.

Text is cut as `serving.evaluation.perplexity` cuts it, by the model's tokenizer, and every system gets the
ids: no tokenizer of a peer takes part. `float` is our engine with the checkpoint's weights in float32.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.models.checkpoint import Checkpoint
from benchmarks.peers.process import Child
from jaxllm.bundle import Bundle
from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer

REFERENCE = "float"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text to score: documents as token ids, in windows that do not overlap.

    Attributes:
      name: of the file.
      windows: (tokens, targets) pairs; each target follows its token.
    """

    name: str
    windows: Sequence[tuple[list[int], list[int]]]

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return sum(len(targets) for _, targets in self.windows)

    @classmethod
    def read(
        cls, path: Path, checkpoint: Checkpoint, *, separator: str | None, window_tokens: int, limit: int = 0
    ) -> "Text":
        """Reads and tokenizes a file.

        Args:
          path: UTF-8 text.
          checkpoint: the model, for its tokenizer.
          separator: splits the text into documents, scored apart.
          window_tokens: most tokens that a prediction sees.
          limit: most windows; 0 means all.

        Raises:
          ConfigError: the file cannot be read, or nothing is left to predict.
        """
        from serving.commands.console import read_text

        text = read_text(path)
        documents = text.split(separator) if separator else [text]
        tokenizer = _tokenizer(checkpoint)
        windows = list(_windows(documents, tokenizer, window_tokens))
        if not windows:
            raise ConfigError(f"{path} holds no token to predict; give a longer text")
        return cls(name=path.name, windows=windows[:limit] if limit else windows)


def perplexity(child: Child, text: Text, progress) -> float:
    """exp of a system's mean negative log-likelihood per predicted token."""
    loss, done = 0.0, 0
    for tokens, targets in text.windows:
        loss += child.score(tokens, targets)
        done += len(targets)
        progress("score", done, text.tokens)
    return math.exp(loss / text.tokens)


def _windows(
    documents: Sequence[str], tokenizer: Tokenizer, window_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    for document in documents:
        if not document.strip():
            continue
        ids = tokenizer.encode(document)
        for at in range(0, len(ids) - 1, window_tokens):
            targets = ids[at + 1 : at + window_tokens + 1]
            yield ids[at : at + len(targets)], targets


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    from jaxllm.checkpoints.tokenizer_folder import read_tokenizer

    if checkpoint.stored is None:
        return Tokenizer(read_tokenizer(checkpoint.model))
    with Bundle.open(checkpoint.model) as bundle:
        return Tokenizer(bundle.tokenizer_files())
