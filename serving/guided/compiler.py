"""Compiles grammars for a model's tokenizer by llguidance."""

import functools
import json
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, one_line
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_bounds import is_ordinary
from serving.guided.grammar import Grammar, parsed_schema
from serving.guided.matcher import Matcher

# A token costs at most some 20 ms, and an answer some 100 MB.
_LIMITS = dict(max_items_in_row=2000, step_lexer_fuel=200_000, step_max_items=50_000, max_lexer_states=50_000)
# A space, or a line break with an indentation: else models may write white space without end.
_WHITE_SPACE = r"( |\n[ ]{0,12})?"


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Threads may share it.

    llguidance is imported, and the tokenizer given to it, with the first grammar, which takes up to a second
    for large vocabularies.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Compiles nothing yet; `vocab_size` is the model's, which may have rows beyond the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def matcher(self, grammar: Grammar, stop_ids: np.ndarray) -> Matcher:
        """Compiles a grammar for one answer.

        Each answer compiles its own: copies of one would share llguidance's lexer, whose states add up to
        their limit over many answers. It takes a millisecond, at most some seconds; calls hold no lock.

        Args:
          grammar: to follow.
          stop_ids: tokens that end the answer, padded with -1.

        Raises:
          ConfigError: the grammar is malformed, matches no text, has an unsupported feature or is too
            complex; the tokenizer cannot be used; or llguidance is not installed.
        """
        library, vocabulary = _llguidance(), self._vocabulary
        limits = library.LLParserLimits(**_LIMITS, verbose_errors=False)
        state = library.LLMatcher(vocabulary, _source(library, grammar), log_level=0, limits=limits)
        if state.is_error():
            raise ConfigError(f"the grammar ({grammar.kind}) cannot be used: {one_line(state.get_error())}")
        rows = np.zeros(self._vocab_size, np.bool_)
        rows[: self._tokenizer.vocab_size] = True
        rows[vocabulary.eos_tokens] = False
        return Matcher(state, rows, stop_ids)

    @functools.cached_property
    def _vocabulary(self) -> Any:
        """The tokenizer as llguidance has it."""
        files = self._tokenizer.files
        if not is_ordinary(files.tokenizer_json):
            raise ConfigError(
                "the model's tokenizer has parts of unknown cost, which run in a child process alone; "
                "grammars need a tokenizer of the usual parts: prepare the model with one"
            )
        if not files.eos_ids:
            raise ConfigError(
                "the model has no end token, which grammars need; name it in the folder's config.json "
                "(eos_token_id), and prepare the folder again"
            )
        data = json.loads(files.tokenizer_json)
        # They would shorten or lengthen the texts that a grammar forces.
        data["truncation"] = data["padding"] = None
        library = _llguidance()
        try:
            return library.LLTokenizer(
                json.dumps(data), n_vocab=self._vocab_size, eos_token=list(files.eos_ids)
            )
        except Exception as error:
            raise ConfigError(
                f"grammars cannot follow the model's tokenizer: {one_line(error)}; they need one whose "
                "tokens are bytes or fall back to bytes"
            ) from error


def _source(library: Any, grammar: Grammar) -> str:
    """A grammar as llguidance takes it."""
    match grammar.kind:
        case "regex":
            return library.LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return library.LLMatcher.grammar_from_lark(grammar.text)
        case "json":
            schema: Any = {"type": "object"}
        case "json_schema":
            schema = parsed_schema(grammar.text)
    defaults = {"whitespace_pattern": _WHITE_SPACE}
    try:
        return library.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults)
    except ValueError as error:
        raise ConfigError(f"the schema cannot be used: {one_line(error)}") from error


def _llguidance() -> Any:
    # Here, because only grammars need it, and a start should not wait for its import.
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "grammars need the package llguidance; install it with: pip install 'jaxllm[serve]'"
        ) from error
    return llguidance
