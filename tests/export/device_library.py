"""Builds `libjaxllm_device`, and calls it by ctypes as an app does."""

import ctypes
import functools
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "native").glob("*.cpp"))
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
STATUSES = (
    "ok", "invalid", "damaged", "unsupported", "no room", "missed", "busy", "no memory", "runtime", "system",
)  # fmt: skip
Int, Long, Size, Text, Real = (
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.c_double,
)
Float, Pointer = ctypes.c_float, ctypes.c_void_p
OnToken = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, Int, Pointer, Size)


def struct(name: str, /, **fields: object) -> type[ctypes.Structure]:
    """A struct of the header."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


File = struct("File", name=Text, descriptor=ctypes.c_int, offset=Long, bytes=Long)
Facts = struct(
    "Facts", name=Text, chat=Text, context_tokens=Int, vocab_size=Int, levels=ctypes.POINTER(Int),
    level_count=Size, drafts=Int, cache_bytes=Size,
)  # fmt: skip
Message = struct("Message", role=Text, content=Text, bytes=Size)
Objective = struct("Objective", first_share=Real, token_share=Real, first_ms=Real, token_ms=Real, strict=Int)
Plan = struct("Plan", level=Int, met=Int, first_ms=Real, token_ms=Real)
Sampling = struct(
    "Sampling", temperature=Float, top_k=Int, top_p=Float, min_p=Float, repetition_penalty=Float,
    presence_penalty=Float, frequency_penalty=Float, seed=ctypes.c_uint64, bias_tokens=ctypes.POINTER(Int),
    biases=ctypes.POINTER(Float), bias_count=Size,
)  # fmt: skip
Request = struct(
    "Request", size=Size, messages=ctypes.POINTER(Message), message_count=Size, text=Text, text_bytes=Size,
    text_flags=ctypes.c_int, tokens=ctypes.POINTER(Int), token_count=Size, continues=Int, max_tokens=Int,
    level=Int, objective=ctypes.POINTER(Objective), sampling=Sampling, stop_tokens=ctypes.POINTER(Int),
    stop_token_count=Size, ignore_end=Int, stops=ctypes.POINTER(Text), stop_count=Size, drafts=Int,
    on_token=OnToken, user=Pointer,
)  # fmt: skip
Result = struct(
    "Result", tokens=ctypes.POINTER(Int), token_count=Size, text=Pointer, text_bytes=Size,
    finish=ctypes.c_int, plan=Plan, prompt_tokens=Size, reused_tokens=Size, drafted_tokens=Size,
    accepted_tokens=Size, first_ms=Real, total_ms=Real,
)  # fmt: skip


class Refused(Exception):
    """A status that is not ok: its name and its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{STATUSES[status]}: {message}")


def build(folder: Path, litert: Path, *flags: str, compiler: str | None = COMPILER) -> Path:
    """Builds the library over a LiteRT."""
    if compiler is None or not litert.exists():
        pytest.skip(f"needs a C++ compiler and {litert.name} of ai-edge-litert")
    path = folder / "libjaxllm_device.so"
    options = [compiler, *FLAGS, "-O1", "-fPIC", "-fvisibility=hidden", *flags]

    def compiled(source: Path) -> str:
        out = str(folder / f"{source.stem}.o")
        subprocess.run([*options, "-c", str(source), "-o", out], check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, SOURCES))
    linked = [*options, "-shared", *objects, "-o", str(path), str(litert), f"-Wl,-rpath,{litert.parent}"]
    subprocess.run(linked, check=True)
    return path


def array(kind: type, values: object) -> ctypes.Array:
    """An array of C."""
    return (kind * len(values))(*values)  # type: ignore[operator, arg-type]


class Library:
    """The library; its functions raise `Refused`."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.free = functools.partial(self._plain, "jaxllm_conversation_free")
        self.close = functools.partial(self._plain, "jaxllm_close")
        self.cancel = functools.partial(self._plain, "jaxllm_cancel")

    def _plain(self, name: str, handle: Pointer) -> None:
        getattr(self._library, name)(handle)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function that returns a status."""
        error = ctypes.create_string_buffer(512)
        status = getattr(self._library, f"jaxllm_{name}")(*arguments, error)
        if status:
            raise Refused(status, error.value.decode())

    def made(self, name: str, *arguments: object, after: tuple[object, ...] = ()) -> Pointer:
        """Calls a function that makes a device or a conversation."""
        handle = Pointer()
        self.call(name, *arguments, ctypes.byref(handle), *after)
        return handle

    def open(self, folder: Path) -> Pointer:
        """Opens a folder with one thread."""
        return self.made("open", str(folder).encode(), Int(1))

    def encode(self, device: Pointer, text: str | bytes, flags: int = 0) -> list[int]:
        """The tokens of a text."""
        raw = text.encode() if isinstance(text, str) else text
        return self._filled(lambda *room: self.call("encode", device, raw, Size(len(raw)), flags, *room), Int)

    def encode_chat(self, device: Pointer, messages: list[tuple[str, str]]) -> list[int]:
        """The tokens of a chat."""
        rows = array(Message, [(role.encode(), text.encode(), len(text.encode())) for role, text in messages])
        return self._filled(lambda *room: self.call("encode_chat", device, rows, Size(len(rows)), *room), Int)

    def decode(self, device: Pointer, ids: list[int]) -> str:
        """The text of tokens."""
        raw = self._filled(
            lambda *room: self.call("decode", device, array(Int, ids), Size(len(ids)), *room), ctypes.c_char
        )
        return b"".join(raw).decode()

    def _filled(self, call: object, kind: type) -> list:
        count = Size(0)
        try:
            call(None, ctypes.byref(count))  # type: ignore[operator]
        except Refused as error:
            if not str(error).startswith("no room"):
                raise
        room = (kind * count.value)()
        call(room, ctypes.byref(count))  # type: ignore[operator]
        return list(room)

    def answer(
        self, conversation: Pointer, prompt: object, *, sampling: dict | None = None, **options: object
    ) -> Result:
        """Answers tokens, a text or messages; the result's `ids` and `words` are the answer's."""
        request, result = Request(), Result()
        self._library.jaxllm_request_init(ctypes.byref(request))
        if isinstance(prompt, str):
            request.text, request.text_bytes = prompt.encode(), len(prompt.encode())
        elif prompt and isinstance(prompt[0], tuple):  # type: ignore[index]
            rows = [(role.encode(), text.encode(), len(text.encode())) for role, text in prompt]  # type: ignore
            request.messages, request.message_count = array(Message, rows), len(rows)
        else:
            request.tokens, request.token_count = array(Int, prompt), len(prompt)  # type: ignore[arg-type]
        for name, value in (sampling or {}).items():
            setattr(request.sampling, name, value)
        for name, value in options.items():
            setattr(request, name, value)
        self.call("answer", conversation, ctypes.byref(request), ctypes.byref(result))
        result.ids = result.tokens[: result.token_count]
        result.words = ctypes.string_at(result.text, result.text_bytes).decode()
        return result
