"""Makes the table of families and rooms of docs/guides/families.md: python -m tests.docs.families"""

from pathlib import Path

from jaxllm.config import ModelConfig
from jaxllm.models.architectures import ARCHITECTURES, WRAPPERS
from jaxllm.models.features import FEATURES, feature_refusal
from tests.docs.page_table import PageTable

_NEEDED = {
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["attention"] * 2, "num_local_experts": 0},
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1]},
}
TABLE = PageTable(Path("docs/guides/families.md"), "families")


def default_config(model_type: str) -> ModelConfig:
    """The config of a family's class with the fewest keys."""
    keys = {"model_type": model_type, **_NEEDED.get(model_type, {})}
    return ARCHITECTURES[model_type].config_from_hf(keys)


def families_table() -> str:
    """The table in Markdown."""
    wrapped: dict[str, list[str]] = {}
    for name, wrapper in WRAPPERS.items():
        for family in wrapper.text_types.values():
            wrapped.setdefault(family, []).append(f"`{name}`")
    lines = [f"| family | also in | {' | '.join(FEATURES)} |", f"|{'---|' * (len(FEATURES) + 2)}"]
    for name in sorted(ARCHITECTURES):
        cfg = default_config(name)
        cells = ["no" if feature_refusal(cfg, room) else "yes" for room in FEATURES]
        if not cfg.experts:
            cells[FEATURES.index("separate experts")] = ""
        lines.append(f"| `{name}` | {', '.join(wrapped.get(name, []))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write(families_table())
