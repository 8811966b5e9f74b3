"""Adds pages to the site that are made from the repository: its root's documents, its sources, its API.

MkDocs calls `on_files` once and `on_page_markdown` for each page. A link from a page to a file or folder of
the repository works on a code host as it stands; on the site it leads to a generated page of that file.
"""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from jaxllm.options import Declaration, without_none

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxllm", "serving", "training", "export", "benchmarks")
# Page of the site -> document of the repository's root that it shows.
DOCUMENTS = {
    f"project/{name.lower()}": name
    for name in ("MODEL_CARD.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
}
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".h": "cpp", ".cpp": "cpp", ".inl": "cpp"}
# Heading of a table of options -> the class that declares them.
OPTIONS = {
    "Engine": "jaxllm.serving.ground.options.EngineOptions",
    "Storage": "jaxllm.serving.host.storage.Storage",
    "Sampling": "jaxllm.sampling_state.Sampling",
    "Generation": "jaxllm.serving.engine.request.GenerationConfig",
    "Contexts": "jaxllm.serving.contexts.options.ContextOptions",
    "Speculation": "jaxllm.serving.ground.speculation_options.SpeculationOptions",
    "Integer prefill": "jaxllm.serving.ground.int8_prefill_options.PrefillOptions",
    "Experts": "jaxllm.serving.ground.expert_options.ExpertOptions",
    "Pretraining": "jaxllm.training.decoders.PretrainRecipe",
    "Low-rank adapters": "jaxllm.training.decoders.LoraRecipe",
    "Elastic models": "jaxllm.training.elastic.job.ElasticRecipe",
    "Tiny LM": "jaxllm.training.elastic.tiny_lm.recipe.TinyLmRecipe",
    "Encoder-decoders": "jaxllm.training.seq2seq.run.Seq2SeqRecipe",
}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds generated pages: root documents, API pages, and the sources that any page links to."""
    pages = {uri: (ROOT / name).read_text(encoding="utf-8") for uri, name in DOCUMENTS.items()}
    pages |= api_pages() | {"options.md": options_page()}
    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= sources_linked(Path(file.abs_src_path or "").read_text(encoding="utf-8"), file.src_uri)
    for uri in DOCUMENTS:
        linked |= sources_linked(pages[uri], uri)
    pages |= {source_uri(path): source_page(path) for path in sorted(linked)}
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the repository to the pages made of them."""
    uri = page.file.src_uri
    here = PurePosixPath(uri).parent

    def led(match: re.Match[str]) -> str:
        path = repository_path(match["target"], uri)
        if path is None:
            return match[0]
        target = {name: each for each, name in DOCUMENTS.items()}.get(path) or source_uri(path)
        if path.startswith("docs/") and path.endswith(".md"):
            target = path.removeprefix("docs/")
        up = "../" * len(here.parts)
        return f"[{match['text']}]({up}{target}{match['anchor'] or ''})"

    return outside_fences(markdown, lambda text: _LINK.sub(led, text))


def options_page() -> str:
    """Tables of options, by their declarations."""
    parts = [
        "# Options\n\nFields of the classes that apps and recipes set, as the code declares them. Options of "
        "commands are on the page of the [command line](cli.md)."
    ]
    for heading, path in OPTIONS.items():
        module, _, name = path.rpartition(".")
        parts.append(
            f"## {heading}\n\n`{path}`\n\n{option_table(getattr(importlib.import_module(module), name))}"
        )
    return "\n\n".join(parts)


def option_table(cls: type) -> str:
    """A Markdown table of a class's options: name, default, allowed values, and the help of the
    declaration, or else the entry in the class's docstring under `Attributes:`."""
    described = _attributes(inspect.getdoc(cls) or "")
    lines = ["| option | default | allowed | |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        declared = field.metadata.get("option", Declaration())
        default = "" if field.default in (None, "", (), dataclasses.MISSING) else f"`{field.default}`"
        meaning = declared.help or described.get(field.name, "")
        cells = (f"`{field.name}`", default, _allowed(field.type, declared), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _attributes(doc: str) -> dict[str, str]:
    """Name of an attribute -> its entry in a docstring of Google's style, in one line."""
    found: dict[str, str] = {}
    name = ""
    for line in doc.partition("\nAttributes:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        begins = re.fullmatch(r"  (\w+): (.*)", line)
        if begins:
            name, found[begins[1]] = begins[1], begins[2]
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _allowed(kind: Any, declared: Declaration) -> str:
    """Choices, or the type and its bounds."""
    kind, optional = without_none(kind)
    several = get_origin(kind) is tuple
    if several:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        text = ", ".join(f"`{each}`" for each in get_args(kind) if each != "")
    else:
        text = getattr(kind, "__name__", str(kind).rpartition(".")[2])
    bounds = (
        ("from", declared.low),
        ("above", declared.above),
        ("to", declared.high),
        ("below", declared.below),
    )
    text += "".join(f" {word} {bound:g}" for word, bound in bounds if bound is not None)
    ascending = ", ascending" if declared.ascending else ""
    return f"{'a list of ' if several else ''}{text}{ascending}{' or none' if optional else ''}"


def outside_fences(markdown: str, change) -> str:
    """Changes all of a page but its code blocks."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def repository_path(target: str, uri: str) -> str | None:
    """The path from the root of the file or folder outside of docs/ that a link of a page leads to, or None.

    Args:
      target: the link's, without an anchor.
      uri: of the page; those made of the root's documents have their links from the root.
    """
    if not target or ":" in target or target.startswith("/") or uri.startswith("source/"):
        return None
    folder = ROOT if uri in DOCUMENTS else (ROOT / "docs" / uri).parent
    path = (folder / target).resolve()
    inside_docs = path.is_relative_to(ROOT / "docs")
    if not path.is_relative_to(ROOT) or not path.exists() or (inside_docs and uri not in DOCUMENTS):
        return None
    return path.relative_to(ROOT).as_posix()


def sources_linked(markdown: str, uri: str) -> set[str]:
    """Files and folders of the repository that a page links to, but for those that have pages."""
    paths = {repository_path(match["target"], uri) for match in _LINK.finditer(_FENCE.sub("", markdown))}
    return {
        path for path in paths if path and path not in DOCUMENTS.values() and not path.startswith("docs/")
    }


def source_uri(path: str) -> str:
    """The page of a file or folder."""
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def source_page(path: str) -> str:
    """A file as a code block, or a folder as the list of its modules with their first sentences."""
    where = ROOT / path
    front = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n"
    if where.is_dir():
        rows = [f"| `{each.name}` | {first_sentence(each)} |" for each in sorted(where.glob("*.py"))]
        rows += [f"| `{each.name}/` | |" for each in sorted(where.iterdir()) if holds_sources(each)]
        return "\n".join([f"{front}# {path}/", "", "| file | what it does |", "|---|---|", *rows])
    language = LANGUAGES.get(where.suffix, "text")
    return f"{front}# {path}\n\n~~~~ {language}\n{where.read_text(encoding='utf-8')}\n~~~~\n"


def holds_sources(folder: Path) -> bool:
    """Whether a folder is a room of its own."""
    return folder.is_dir() and any(folder.glob("*.py"))


def first_sentence(module: Path) -> str:
    """The first line of a module's docstring."""
    doc = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return doc.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def api_pages() -> dict[str, str]:
    """Pages of mkdocstrings' directives: the front door's names, and each room's modules."""
    public = public_names()
    names = "\n\n".join(
        f"::: {home}.{name}\n    options: {{skip_local_inventory: true}}" for name, home in public.items()
    )
    pages = {"api/public.md": f"# Public names\n\n`from jaxllm import ...` gives these.\n\n{names}\n"}
    rooms = []
    for package in PACKAGES:
        for room, modules in rooms_of(package).items():
            body = "\n\n".join(f"::: {module}\n    options: {{heading_level: 2}}" for module in modules)
            pages[f"api/{room}.md"] = f"# {room}\n\n{body}\n"
            rooms.append((room, first_sentence(module_file(modules[0]))))
    lines = "\n".join(f"| [`{room}`]({room}.md) | {sentence} |" for room, sentence in rooms)
    pages["api/index.md"] = (
        "# Python reference\n\nApps import the [public names](public.md) from `jaxllm`. The rooms below are "
        f"internal: they may change between versions.\n\n| room | begins with |\n|---|---|\n{lines}\n"
    )
    return pages


def public_names() -> dict[str, str]:
    """Public name -> module, as the front door's source lists them."""
    tree = ast.parse((ROOT / "jaxllm" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="_PUBLIC")], value=public):
                listed = ast.literal_eval(public).items()
                return {name: f"jaxllm.{module}" for module, names in listed for name in names.split()}
    raise ValueError("jaxllm/__init__.py has no list of public names (_PUBLIC)")


def rooms_of(package: str) -> dict[str, list[str]]:
    """Dotted room -> its modules; a package's own modules are the room of its name."""
    rooms: dict[str, list[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__init__" and path.stat().st_size:
            rooms.setdefault(".".join(parts[:-1]), []).append(".".join(parts))
    return rooms


def module_file(dotted: str) -> Path:
    """The file of a module."""
    return ROOT / f"{dotted.replace('.', '/')}.py"
