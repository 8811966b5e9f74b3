import jax
import numpy as np

from jaxllm.elastic.adapter_buffer import adapter_locations, fill_buffer
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.elastic.submodel import counted_sub_model, layer_part
from jaxllm.models.parameters import param_specs
from jaxllm.quant import AdaptedFromBuffer
from tests.elastic.models import LLAMA

RANKS = {"layers.0.attn.q": 3, "layers.0.attn.o": 5, "layers.2.ffn.down": 2}


def random_adapter(cfg, ranks, seed):
    draw, adapter = np.random.default_rng(seed), {}
    for name, rank in ranks.items():
        *units, width = param_specs(cfg)[name].shape
        adapter[f"{name}.left"] = draw.normal(size=(*units, rank)).astype(np.float32)
        adapter[f"{name}.right"] = draw.normal(size=(rank, width)).astype(np.float32)
    return adapter


def changes(buffer, locations):
    """What the buffer adds to each parameter."""
    return {
        name: np.asarray(
            AdaptedFromBuffer(np.zeros(param_specs(LLAMA)[name].shape), buffer, offset, rank).apart.change
        )
        for name, offset, rank in locations
    }


def test_adapters_of_a_model_and_of_a_sub_model_add_up_in_one_buffer():
    cfg = sub_config(LLAMA, Ladder(anchors=(1,)), 50)
    whole = random_adapter(LLAMA, {"layers.0.attn.q": 2, "layers.2.ffn.down": 2}, 0)
    part = random_adapter(cfg, {"layers.0.attn.q": 1, "layers.0.attn.o": 4}, 1)
    locations = adapter_locations(LLAMA, RANKS)
    buffer = fill_buffer(LLAMA, locations, [(whole, 0.5), (part, 2.0)])
    found = changes(buffer, locations)
    for name in RANKS:
        expected = np.zeros(param_specs(LLAMA)[name].shape)
        for adapter, scaling in ((whole, 0.5), (part, 2.0)):
            if f"{name}.left" in adapter:
                change = scaling * adapter[f"{name}.left"] @ adapter[f"{name}.right"]
                expected[tuple(map(slice, change.shape))] += change
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-5)


def test_locations_do_not_overlap_and_nearly_fill_the_buffer():
    locations = adapter_locations(LLAMA, RANKS)
    taken = np.zeros(len(fill_buffer(LLAMA, locations, [])), int)
    for name, offset, rank in locations:
        weight = AdaptedFromBuffer(np.zeros(param_specs(LLAMA)[name].shape), taken, offset, rank)
        taken[offset : weight.right_at + rank * weight.shape[-1]] += 1
    assert taken.max() == 1
    # Each begins where memory may be shared from.
    assert (taken == 0).sum() < 16 * len(locations)
    assert all(each.offset % 16 == 0 for each in locations)


def test_layers_of_one_kind_share_the_form_of_their_parts():
    ranks = {f"layers.{layer}.{name}": 3 for layer in range(3) for name in ("ffn.up", "attn.q")}
    locations = adapter_locations(LLAMA, ranks)
    adapter = random_adapter(LLAMA, ranks, 2)
    params = {name: np.zeros(spec.shape, np.float32) for name, spec in param_specs(LLAMA).items()}
    buffer = fill_buffer(LLAMA, locations, [(adapter, 1.0)])
    whole = counted_sub_model(params, LLAMA, locations=locations, adapters=buffer, rank=3)
    parts = [layer_part(whole, layer, 1) for layer in range(3)]
    assert len({(part.locations, part.adapters.shape) for part in parts}) == 1
    for layer, part in enumerate(parts):
        assert part.whole.keys() == {name for name in params if name.startswith("layers.1.")}
        left, right = (adapter[f"layers.{layer}.attn.q.{side}"] for side in ("left", "right"))
        found = part.params["layers.1.attn.q"].apart.change
        np.testing.assert_allclose(found, left @ right, rtol=1e-5, atol=1e-5)
    assert layer_part(counted_sub_model(params, LLAMA), 0, 1).adapters is None


def test_a_cpu_takes_a_buffer_without_a_copy():
    buffer = fill_buffer(LLAMA, adapter_locations(LLAMA, RANKS), [])
    assert not buffer.any()
    device = jax.devices("cpu")[0]
    placed = jax.device_put(buffer, device, may_alias=True)
    assert placed.unsafe_buffer_pointer() == buffer.ctypes.data
