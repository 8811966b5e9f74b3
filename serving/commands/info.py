"""`jaxllm info`: what a bundle holds, and whether it is whole."""

import collections
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import click
import jax

import jaxllm
from jaxllm.bundle import Bundle
from jaxllm.bundle.elastic import read_ladder
from jaxllm.bundle.experts import expert_facts
from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.kernels import native
from jaxllm.models.parameters import parameter_count
from serving.console import print_json
from serving.experts.store import ExpertStore
from serving.models import find_model


@click.command("info")
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read the whole file and check every checksum.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info_command(bundle: Path | None, verify: bool, as_json: bool) -> None:
    """Describe a BUNDLE (default: the packaged model) and the device."""
    path = find_model(bundle)
    chosen = native.kernels()
    with Bundle.open(path) as opened:
        if verify:
            opened.verify()
        facts = {
            "model": opened.layout.name,
            "weights": opened.layout.weights,
            "parameters": parameter_count(opened.cfg),
            "file_bytes": path.stat().st_size,
            "fingerprint": opened.fingerprint,
            "verified": verify,
            **_levels(opened),
            **_experts(opened),
            "config": dataclasses.asdict(opened.cfg),
            "jaxllm": jaxllm.__version__,
            "jax": jax.__version__,
            "device": str(jax.devices()[0].device_kind),
            "kernels": chosen.name,
            "kernels_reason": chosen.reason,
            "kernels_available": list(chosen.choices),
            "kernel_threads": native.threads(),
        }
    if as_json:
        print_json(facts)
        return
    facts |= facts.pop("config")
    width = max(map(len, facts))
    # Plain lines: a table would cut a fingerprint to the width of a terminal.
    for key, value in facts.items():
        click.echo(f"{key:<{width}}  {value}")


def _experts(bundle: Bundle) -> dict[str, Any]:
    """The widths of experts that are stored apart, and how they were found."""
    if not bundle.layout.experts_apart:
        return {}
    store = ExpertStore(bundle)
    keys = itertools.product(range(len(store.sparse)), range(store.experts))
    widths = collections.Counter(store[key].bits for key in keys)
    return {
        "expert_widths": {str(bits): widths[bits] for bits in store.widths},
        "calibration": expert_facts(bundle),
    }


def _levels(bundle: Bundle) -> dict[str, Any]:
    """What makes a bundle elastic, if it is."""
    ladder = read_ladder(bundle)
    if ladder is None:
        return {}
    return {
        "levels": list(ladder.levels),
        "anchors": list(ladder.anchors),
        "tiny_lm": read_tiny_lm(bundle) is not None,
    }
