"""Bytes that copies in a compiled program move: XLA copies an array where it cannot update it in place."""

import re
from collections.abc import Iterator, Mapping

import jax
import numpy as np

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_NAMES = r"%?([\w.\-]+)"


def copied_bytes(compiled: jax.stages.Compiled) -> int:
    """Of one run: loops whose rounds are known by as many of them, others by one round, and all branches."""
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in (compiled.as_text() or "").splitlines():
        if found := re.match(rf"(ENTRY )?{_NAMES} .*\{{$", line):
            name = found[2]
            entry = name if found[1] else entry
        lines.setdefault(name, []).append(line)
    return sum(_copies(lines, entry, 1))


def _copies(lines: Mapping[str, list[str]], name: str, rounds: int) -> Iterator[int]:
    for line in lines[name]:
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        shape, kind, rest = found.groups()
        if kind == "copy":
            dtype, sizes = re.match(r"(\w+)\[([\d,]*)\]", shape).groups()  # pyright: ignore
            yield rounds * _BYTES[dtype] * int(np.prod([int(size) for size in sizes.split(",") if size]))
        elif kind == "while":
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
            body = re.search(rf"body={_NAMES}", rest)[1]  # pyright: ignore
            yield from _copies(lines, body, rounds * int(known[1] if known else 1))
        elif kind in ("call", "conditional"):
            called = re.findall(rf"(?:to_apply|(?:true|false)_computation)={_NAMES}", rest)
            for branches in re.findall(r"branch_computations=\{(.*?)\}", rest):
                called += [each.strip(" %") for each in branches.split(",")]
            for each in called:
                yield from _copies(lines, each, rounds)
