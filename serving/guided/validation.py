"""Checks finished answers against what grammars cannot express of their schemas.

Patterns of a schema may search for hours, and comparisons of its values grow with their square: a check runs
in a process of its own, with limits of time and memory.
"""

import importlib.util
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm.errors import one_line
from jaxllm.serving.guided.grammar import Grammar

# Of the processor, and wall-clock time on a busy machine.
_CHECK_S, _LATE_S = 1, 10.0
_MEMORY_BYTES = 1 << 30
# Keywords that a grammar follows in part only, and parts of expressions that it cannot read; any may be
# spelled with escapes. Of larger schemas the compiler may not be able to combine the parts.
_PARTLY = re.compile(
    r'"(?:not|if|oneOf|uniqueItems|contains|minContains|maxContains|propertyNames|dependencies|dependentRequired'
    r"|dependentSchemas|unevaluatedProperties|unevaluatedItems|patternProperties|extends|disallow|divisibleBy"
    r'|\$dynamicRef|\$recursiveRef)"|\(\?[=!<]|\\[1-9]|\\u'
)
_SMALL_CHARS = 1 << 13
_BOOT = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "from jaxllm.serving.guided.validation import main; main()"
)


def unmet(grammar: Grammar, text: str, *, whole: bool = False) -> str | None:
    """What a finished answer breaks of its grammar's schema; None if it breaks nothing.

    Grammars enforce what they can: this checks the rest, such as `uniqueItems` and overlaps of `oneOf`. It
    waits some 0.3 seconds for a process if the schema has such a keyword; call it in a thread.

    Args:
      grammar: the answer's grammar. Nothing is to be checked of other kinds than "json_schema".
      text: the answer, without its thought.
      whole: whether nothing is known to be enforced, so that all of the schema is checked.

    Returns:
      One line with the place and the reason, or why nothing can be said.
    """
    large = len(grammar.text) > _SMALL_CHARS
    if grammar.kind != "json_schema" or not (whole or large or _PARTLY.search(grammar.text)):
        return None
    if importlib.util.find_spec("jsonschema") is None:
        return "not checked: answers are validated by the package jsonschema; pip install jsonschema"
    package = str(Path(__file__).absolute().parents[3])
    command = [sys.executable, "-I", "-c", _BOOT, json.dumps([package, *filter(None, sys.path)])]
    try:
        done = subprocess.run(
            command,
            input=json.dumps({"schema": grammar.text, "text": text}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_LATE_S,
            start_new_session=True,
        )
        return json.loads(done.stdout)["unmet"]
    except (subprocess.TimeoutExpired, OSError, ValueError):
        return "not checked: the schema takes too long to validate, or too much memory"


def main() -> None:
    """The process of a check: reads a schema and a text, and writes what the text breaks."""
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, _MEMORY_BYTES)):
        resource.setrlimit(limit, (value, value))
    request = json.loads(sys.stdin.buffer.read())
    signal.setitimer(signal.ITIMER_PROF, _CHECK_S)
    print(json.dumps({"unmet": _broken(json.loads(request["schema"]), request["text"])}))


def _broken(schema: Any, text: str) -> str | None:
    """What a text breaks of a schema."""
    from jsonschema.exceptions import best_match

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"the text is not JSON: {one_line(error)}"
    try:
        error = best_match(_validator(schema).iter_errors(value))
    except Exception as error:  # Of a schema that is none, any.
        return f"not checked: the schema cannot be validated: {one_line(error)}"
    return None if error is None else f"{error.json_path:.200}: {one_line(error.message):.300}"


def _validator(schema: Any) -> Any:
    from jsonschema import validators
    from jsonschema_specifications import REGISTRY

    from jaxllm.serving.guided.schema import dialect

    draft = validators.validator_for({"$schema": dialect(schema)}, default=validators.Draft202012Validator)
    return validators.extend(draft, {"pattern": _pattern})(schema, registry=REGISTRY)


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Checks a pattern; the grammar has checked those of which Python knows less than ECMAScript."""
    from jsonschema.exceptions import ValidationError

    del schema
    try:
        if validator.is_type(value, "string") and not re.search(pattern, value):
            yield ValidationError(f"{value!r:.80} does not match {pattern!r:.80}")
    except re.error:
        return
