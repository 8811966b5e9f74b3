"""Remembers the user's consent to licences that ask for it.

A licence asks if its owner gates the model at the hub, or if it is one of the terms of Gemma and Llama.
Consent is kept in the user's cache, by the model's name: where that is cleared, the next `jaxllm pull` asks
again.
"""

import dataclasses
import json
import os
import re
from pathlib import Path

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.serving.host.user_cache import cache_folder, make_private_folder, private_file

_ASK = re.compile(r"(gemma|.*llama).*")
_MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Licence:
    """The licence of a model.

    Attributes:
      model: the model's name for `--model`.
      of: the name that consent covers, such as a repository's; by default `model`.
      name: name of the licence; empty if unknown.
      terms: where its text can be read.
      gated: whether the hub gives the model's files to those who accepted its terms there.
    """

    model: str
    name: str
    terms: str
    gated: bool = False
    of: str = ""

    @property
    def asks(self) -> bool:
        """Whether it asks for consent."""
        return self.gated or _ASK.fullmatch(self.name.lower()) is not None

    @property
    def accepted(self) -> bool:
        """Whether the user has accepted it."""
        return _read().get(self.of or self.model) == self.name

    def accept(self) -> None:
        """Remembers the user's consent. Raises CheckpointError or ConfigError if the cache cannot be written,
        or others may write to it."""
        path = _path()
        try:
            make_private_folder(path.parent)
            text = json.dumps(_read() | {self.of or self.model: self.name}, indent=1, sort_keys=True)
            with atomic_file(path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(text.encode())
        except OSError as error:
            raise CheckpointError(
                f"{path}: consent cannot be kept ({error.strerror}); set JAXLLM_CACHE to a writable folder"
            ) from error

    def require_consent(self) -> None:
        """Raises ConfigError if it asks for consent and the user has not accepted it."""
        if self.asks and not self.accepted:
            raise ConfigError(
                f"{self.model} has the licence {self.name or 'of its owner'}, which asks for consent: read "
                f"{self.terms}, then run `jaxllm pull {self.model} --accept-license`"
            )


def _path() -> Path:
    return cache_folder() / "licences.json"


def _read() -> dict[str, str]:
    try:
        with private_file(_path()) as number:
            found = json.loads(os.read(number, _MOST_BYTES))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
