"""Runs a tokenizer of unknown cost in a child process with bounds of time and memory."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.text.child_process import ChildFailed, TextProcess
from jaxllm.text.library_tokenizer import Encoded
from jaxllm.text.marked_text import MarkedText

LOAD_S = 30.0
CALL_S = 10.0
# Further time for long texts.
_S_PER_CHARACTER = 1e-5
_LEAST_BYTES = 1 << 31
# A loaded tokenizer needs many times the size of its tokenizer.json.
_BYTES_PER_CHARACTER = 64


class ConfinedTokenizer:
    """A `LibraryTokenizer` in a child process, with the same attributes and methods.

    Raises:
      CheckpointError: `tokenizer_json` is not a tokenizer, or cannot be loaded within its bounds.
    """

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int], special: Mapping[str, str]) -> None:
        load = {
            "operation": "load",
            "tokenizer_json": tokenizer_json,
            "eos_ids": list(eos_ids),
            "special": dict(special),
        }
        memory_bytes = _LEAST_BYTES + _BYTES_PER_CHARACTER * len(tokenizer_json)
        self._process = TextProcess(memory_bytes=memory_bytes, setup=load, setup_s=LOAD_S)
        try:
            facts = self._process.ask({"operation": "facts"}, limit_s=CALL_S)
        except ChildFailed as error:
            raise CheckpointError(
                f"malformed tokenizer.json: {error}; save it again with the tokenizers library, or take "
                "another one"
            ) from error
        self.vocab_size: int = facts["vocab_size"]
        self.spelled: tuple[str, ...] = tuple(facts["spelled"])

    def encode_marked(self, text: MarkedText, *, add_special_tokens: bool) -> Encoded:
        """See `LibraryTokenizer`."""
        edges = np.flatnonzero(np.diff(text.content, prepend=False, append=False)).reshape(-1, 2)
        ids, offsets = self._ask(
            {
                "operation": "encode",
                "text": text.text,
                "content": edges.tolist(),
                "add_special_tokens": add_special_tokens,
            },
            CALL_S + _S_PER_CHARACTER * len(text.text),
            "cannot read this text",
        )
        return Encoded(ids, [(start, end) for start, end in offsets])

    def encode_many(self, texts: Sequence[MarkedText], *, add_special_tokens: bool) -> list[list[int]]:
        """See `LibraryTokenizer`; one after the other."""
        return [self.encode_marked(each, add_special_tokens=add_special_tokens).ids for each in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `LibraryTokenizer`."""
        arguments = {"ids": list(ids), "skip_special_tokens": skip_special_tokens}
        request = {"operation": "call", "method": "decode", "arguments": arguments}
        return self._ask(request, CALL_S + _S_PER_CHARACTER * len(ids), "cannot write these tokens")

    def token_id(self, token: str) -> int | None:
        """See `LibraryTokenizer`."""
        request = {"operation": "call", "method": "token_id", "arguments": {"token": token}}
        return self._ask(request, CALL_S, "cannot be asked for a token")

    def vocabulary(self) -> dict[str, int]:
        """See `LibraryTokenizer`."""
        request = {"operation": "call", "method": "vocabulary", "arguments": {}}
        return self._ask(request, LOAD_S, "cannot be asked for its tokens")

    def _ask(self, request: Mapping[str, object], limit_s: float, what: str):
        try:
            return self._process.ask(request, limit_s=limit_s)
        except ChildFailed as error:
            raise ConfigError(
                f"the model's tokenizer {what}: {error}; prepare the model with another one"
            ) from error
