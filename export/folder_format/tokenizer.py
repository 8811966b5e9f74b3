"""Reads and writes the tokenizer of exported programs."""

import json
from pathlib import Path

from jaxllm.errors import CheckpointError, ProgramError
from jaxllm.export.folder_format.manifest import TOKENIZER, Manifest
from jaxllm.text.tokenizer import TokenizerFiles

_MAX_TOKENIZER_BYTES = 64 << 20


def write_tokenizer(folder: Path, files: TokenizerFiles) -> None:
    """Writes the tokenizer into the programs' folder."""
    (folder / TOKENIZER).write_text(json.dumps(files.to_json()), encoding="utf-8")


def read_tokenizer(manifest: Manifest, folder: Path) -> TokenizerFiles:
    """Reads the tokenizer in the programs' folder.

    Raises:
      ProgramError: it is malformed.
    """
    path = folder / TOKENIZER
    text = manifest.read_intact(folder, TOKENIZER, most_bytes=_MAX_TOKENIZER_BYTES)
    try:
        return TokenizerFiles.from_json(json.loads(text))
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise ProgramError(f"{path}: malformed ({error!s:.200}); export the model again") from error
