"""Answers the requests of `jaxllm.text.child_process` in its child process.

Requests and answers are JSON, preceded by their lengths. A request names an operation of `OPERATIONS`; an
exception becomes the answer, unless it ends the process.
"""

import contextlib
import datetime
import functools
import json
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.errors import JaxllmError, TemplateError, one_line

# Maximum number of characters of a template's output: far above any model's window.
MAX_OUTPUT_CHARACTERS = 1 << 26

_LENGTH = struct.Struct(">Q")


def serve(memory_bytes: int) -> None:
    """Answers requests until the input ends."""
    _bound_memory(memory_bytes)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # stdout is only for answers: prints of libraries go to stderr.
    sys.stdout = sys.stderr
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        request = json.loads(source.read(_LENGTH.unpack(head)[0]))
        _bound_time(request["limit_s"])
        reply = _answer(request)
        raw = json.dumps(reply).encode()
        sink.write(_LENGTH.pack(len(raw)) + raw)
        sink.flush()
        if "failed" in reply:
            return


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": OPERATIONS[request["operation"]](request)}
    except JaxllmError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except MemoryError:
        return {"failed": "it takes more memory than it may have"}
    except BaseException as error:  # Panics of the tokenizers library are no `Exception`.
        return {"failed": one_line(f"{type(error).__name__}: {error}")}


def _render(request: Mapping[str, Any]) -> str:
    now = request["now"]
    text = _template(request["source"]).run(
        request["variables"], None if now is None else datetime.datetime.fromisoformat(now)
    )
    if len(text) > MAX_OUTPUT_CHARACTERS:
        raise TemplateError(
            f"the model's chat template writes {len(text)} characters; at most "
            f"{MAX_OUTPUT_CHARACTERS} are read"
        )
    return text


@functools.lru_cache(maxsize=8)
def _template(source: str) -> Any:
    from jaxllm.text.template_program import TemplateProgram

    return TemplateProgram(source)


def _load(request: Mapping[str, Any]) -> None:
    # Imported here, because templates do not need it.
    from jaxllm.text.library_tokenizer import LibraryTokenizer

    _state["tokenizer"] = LibraryTokenizer(request["tokenizer_json"], request["eos_ids"], request["special"])


def _encode(request: Mapping[str, Any]) -> list[Any]:
    import numpy as np

    from jaxllm.text.marked_text import MarkedText

    content = np.zeros(len(request["text"]), np.bool_)
    for start, end in request["content"]:
        content[start:end] = True
    encoded = _state["tokenizer"].encode_marked(
        MarkedText(request["text"], content), add_special_tokens=request["add_special_tokens"]
    )
    return [encoded.ids, encoded.offsets]


def _match(request: Mapping[str, Any]) -> list[Any]:
    from jaxllm.text.child_process import match_here

    return match_here(request["expressions"], request["names"], full=request["full"])


_state: dict[str, Any] = {}

OPERATIONS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "render": _render,
    "load": _load,
    "facts": lambda _: {each: getattr(_state["tokenizer"], each) for each in ("vocab_size", "spelled")},
    "encode": _encode,
    "call": lambda request: getattr(_state["tokenizer"], request["method"])(**request["arguments"]),
    "match": _match,
}


def _bound_memory(memory_bytes: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _bound_time(limit_s: float) -> None:
    """Limits processor time from now on; this ends a child whose parent is gone."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        until = int(used.ru_utime + used.ru_stime + limit_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))
