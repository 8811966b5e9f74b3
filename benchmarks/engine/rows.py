"""Makes rows of what was measured of engines."""

from collections.abc import Mapping

from benchmarks.engine.systems import OURS, PER_TOKEN
from benchmarks.measuring.report import Row, compared
from benchmarks.peers.alternation import Result, System
from benchmarks.peers.perplexity import Text
from benchmarks.peers.process import Child


def opening_rows(name: str, child: Child) -> list[Row]:
    """Times and memory of opening our engine."""
    facts = child.facts
    note = f"{facts['buckets_read']} buckets read from disk" if facts["buckets_read"] else None
    memory = child.open_peak_bytes + facts["device_bytes"]
    return [
        row(name, "load_ms", facts["load_ms"], "ms"),
        row(name, "build_ms", facts["build_ms"], "ms", note=note),
        row(name, "buckets", facts["buckets"], "buckets"),
        row(f"{name}, load and build", "peak_memory_bytes", memory, "bytes"),
    ]


def size_rows(name: str, group: Mapping[str, System], *, again: bool) -> list[Row]:
    """Sizes of the weights; `again` says that peers were made from weights that were quantized before."""
    facts = {system: each.child.facts for system, each in group.items() if system != PER_TOKEN}
    notes = {
        system: fact["format"] + (", quantized twice" if again else "")
        for system, fact in facts.items()
        if "format" in fact
    }
    bits = {system: fact["bits_per_weight"] for system, fact in facts.items()}
    return [
        row(name, "weight_bytes", facts[OURS]["weight_bytes"], "bytes"),
        *compared(
            bits,
            ours=OURS,
            case=name,
            metric="bits_per_weight",
            unit="bits",
            notes=notes,
            lower_is_better=True,
        ),
    ]


def speed_rows(
    name: str,
    group: Mapping[str, System],
    results: Mapping[tuple[str, int], Result],
    prompt: int,
    tokens: int,
) -> list[Row]:
    """Prefill and decode at one prompt length, and the share of memory's bandwidth that decoding reaches."""
    found = {system: results[each.name, prompt] for system, each in group.items()}
    ours = found[OURS]
    case = f"{name}, prompt {prompt}"
    rows = [row(case, "ttft_ms", ours.prefill_ms, "ms", note=_note(ours, None))]
    rows += compared(
        {system: 1000 * prompt / each.prefill_ms for system, each in found.items() if system != PER_TOKEN},
        ours=OURS,
        case=case,
        metric="prefill_tokens_per_s",
        unit="tokens/s",
        notes={system: _note(each, each.prefill_setting) for system, each in found.items()},
    )
    if ours.prefill_kernel_ms:
        rows.append(row(case, "kernel_share", ours.prefill_kernel_ms / ours.prefill_ms, "share"))
    rates = {system: 1000 * tokens / each.decode_ms for system, each in found.items()}
    case = f"{name}, decode {tokens} after {prompt}"
    rows += compared(
        rates,
        ours=OURS,
        case=case,
        metric="decode_tokens_per_s",
        unit="tokens/s",
        notes={system: _note(each, each.decode_setting) for system, each in found.items()},
    )
    if ours.decode_kernel_ms:
        rows.append(row(case, "kernel_share", ours.decode_kernel_ms / ours.decode_ms, "share"))
    for system, each in found.items():
        if system != PER_TOKEN:
            share = group[system].child.facts["step_bytes"] * tokens / each.readable_bytes
            rows.append(row(case, "bandwidth_share", share, "share", system=system))
    return rows


def memory_rows(name: str, group: Mapping[str, System]) -> list[Row]:
    """Peak memory of each process while it answered, its libraries and mapped files included."""
    values = {
        system: each.child.peak_bytes + each.child.facts.get("device_bytes", 0)
        for system, each in group.items()
        if system != PER_TOKEN
    }
    return compared(
        values,
        ours=OURS,
        case=f"{name}, run",
        metric="peak_memory_bytes",
        unit="bytes",
        lower_is_better=True,
    )


def quality_rows(
    name: str, children: Mapping[str, Child], values: Mapping[Child, float], text: Text
) -> list[Row]:
    """Perplexity of every system on a text; `float` is ours in float32."""
    return compared(
        {system: values[child] for system, child in children.items()},
        ours=OURS,
        case=f"{name}, {text.name}, {text.tokens} tokens",
        metric="perplexity",
        unit="",
        notes={system: child.facts.get("format") for system, child in children.items()},
        lower_is_better=True,
    )


def row(
    case: str, metric: str, value: float, unit: str, *, system: str = OURS, note: str | None = None
) -> Row:
    """A row without a baseline."""
    return Row(case=case, system=system, metric=metric, value=value, unit=unit, note=note)


def _note(result: Result, setting: str | None) -> str | None:
    """How a system ran, and whether others ran beside it."""
    disturbed = f"{result.disturbed} of {result.samples} rounds disturbed" if result.disturbed else ""
    return ", ".join(filter(None, (setting, disturbed))) or None
