"""Matches names with regular expressions of unknown cost, in a child process with bounds of time and memory.

A few characters of an expression can compute for years, and Python cannot interrupt a match. Literal text is
matched here.
"""

import re
from collections.abc import Sequence

from jaxllm.errors import ConfigError
from jaxllm.text.child_process import ChildFailed, TextProcess

_LITERAL = re.compile(r"(?:[\w.-]|\\[.-])*", re.ASCII)
_LIMIT_S, _MEMORY_BYTES = 10.0, 1 << 30
_MAX_CHARACTERS = 1 << 20


def first_matches(
    patterns: Sequence[str], names: Sequence[str], *, before: str = "", after: str = "", full: bool = False
) -> list[tuple[int, list[str | None]] | None]:
    """For each name, the first expression that matches from its beginning.

    Args:
      patterns: regular expressions.
      names: names to match.
      before: expression before each of `patterns`.
      after: expression after each of them.
      full: whether the whole name must match.

    Returns:
      The number of the first match, and its groups; None for names without a match.

    Raises:
      ConfigError: an expression is malformed, or its match exceeds the time limit.
    """
    expressions = [f"{before}{each}{after}" for each in patterns]
    if not expressions or not names:
        return [None] * len(names)
    if sum(map(len, expressions)) > _MAX_CHARACTERS:
        raise ConfigError(f"regular expressions of more than {_MAX_CHARACTERS} characters are not matched")
    if all(_LITERAL.fullmatch(each) for each in patterns):
        return match_here(expressions, names, full=full)
    process = TextProcess(memory_bytes=_MEMORY_BYTES)
    request = {"operation": "match", "expressions": expressions, "names": list(names), "full": full}
    try:
        return process.ask(request, limit_s=_LIMIT_S)
    except ChildFailed as error:
        shown = ", ".join(patterns)
        raise ConfigError(f"the regular expressions {shown:.200} cannot be matched: {error}") from error


def match_here(
    expressions: Sequence[str], names: Sequence[str], *, full: bool = False
) -> list[tuple[int, list[str | None]] | None]:
    """`first_matches` in this process, without bounds.

    Raises:
      ConfigError: an expression is malformed.
    """
    compiled = []
    for expression in expressions:
        try:
            compiled.append(re.compile(expression))
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{expression!r:.200} is no regular expression: {error}") from error
    found = []
    for name in names:
        matches = (
            (number, each.fullmatch(name) if full else each.match(name))
            for number, each in enumerate(compiled)
        )
        found.append(next(((number, list(match.groups())) for number, match in matches if match), None))
    return found
