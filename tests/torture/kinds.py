"""The kinds of files that are harmed: of which files a victim is made, and what is of interest in them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.torture import codecs as formats
from tests.torture.values import ADAPTER, CONFIG, TOKENIZER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file.

    Attributes:
      name: of the kind, and of its folder among the victims.
      use: by which its copies are used; that of the kind's name unless it is given.
      codecs: of its files, by pattern.
      values: of keys in its documents that are of interest.
      sign: makes checksums right again that are in another file than what they are of.
      share: of all mutations, relative to other kinds'.
      deep: the share of its cases that go all the way to an answer.
    """

    name: str
    use: str = ""
    codecs: Mapping[str, formats.Codec]
    values: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    sign: Callable[[Path], None] | None = None
    share: float = 1.0
    deep: float = 0.0

    def files(self, victims: Path) -> dict[str, formats.Codec]:
        """The codec of each of its victim's files."""
        folder = victims / self.name
        found = {
            str(path.relative_to(folder)): codec
            for pattern, codec in self.codecs.items()
            for path in sorted(folder.glob(pattern))
            if path.is_file()
        }
        assert found, f"{self.name} has no files in {folder}"
        return found


def _bundle(name: str, share: float) -> Kind:
    return Kind(
        name=name, use="bundle", codecs={"model.jaxllm": formats.BundleFile()}, share=share, deep=0.03
    )


_FOLDER = {
    "config.json": formats.Json(),
    "generation_config.json": formats.Json(),
    "*.safetensors": formats.Safetensors(),
}
_TOKENIZER_FILES = {
    "tokenizer*.json": formats.Json(),
    "special_tokens_map.json": formats.Json(),
    "*.jinja": formats.Codec(),
}
_CONTEXTS = {
    "store/catalog.sqlite": formats.CatalogFile(),
    "store/app-*/*/*.kv": formats.SegmentFile(),
}
KINDS: tuple[Kind, ...] = (
    _bundle("bundle", 2.0),
    _bundle("elastic", 1.5),
    _bundle("mixture", 1.0),
    _bundle("apart", 1.0),
    _bundle("calibrated", 1.5),
    Kind(name="folder", codecs=_FOLDER, values=CONFIG, share=1.5, deep=0.03),
    Kind(
        name="tokenizer", codecs=_TOKENIZER_FILES, values=TOKENIZER,
        share=2.0,
    ),
    Kind(
        name="adapter", values=ADAPTER, share=1.5, deep=0.02,
        codecs={"*.json": formats.Json(), "*.safetensors": formats.Safetensors()},
    ),
    Kind(name="contexts", codecs=_CONTEXTS, share=3.0, deep=0.05),
    Kind(name="trace", codecs={"trace.jsonl": formats.JsonLines()}, share=1.5),
    Kind(name="profile", codecs={"profile.json": formats.CheckedJson()}, share=1.5),
    Kind(name="recipe", codecs={"**/*.toml": formats.Toml()}, share=1.0),
    Kind(
        name="tasks",
        codecs={"tasks/*/*.jsonl": formats.JsonLines(), "tasks/ui_automation/*.json": formats.Json()},
    ),
    Kind(
        name="program", sign=formats.sign_program, share=0.7, deep=0.1,
        codecs={**_FOLDER, "*.json": formats.Json(), "**/*.stablehlo": formats.Signed()},
    ),
    Kind(name="graphs", codecs={"**/*": formats.Codec()}, share=0.1),
)  # fmt: skip
