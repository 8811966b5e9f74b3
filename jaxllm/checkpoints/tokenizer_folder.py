"""Reads and writes the tokenizer of a Hugging Face model folder.

Reads `tokenizer.json`, and from the files next to it the special tokens, end tokens and chat template.
Older folders have a SentencePiece model, or a vocabulary and merges: these are converted with transformers,
if it is installed. Code in a folder or named by it (`auto_map`) is never run.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError, ConfigError, TemplateError, one_line
from jaxllm.files.atomic import atomic_file
from jaxllm.files.input_files import read_bytes, read_json, read_text
from jaxllm.sampling_state import MODEL_SAMPLING, Sampling
from jaxllm.text.tokenizer import AnyTokenizer, Tokenizer, TokenizerFiles, open_tokenizer
from jaxllm.text.tokenizer_files import MAX_TEMPLATES

# The largest published tokenizer.json files take about 40 MiB.
MAX_FILE_BYTES = 256 << 20
_MAX_TEMPLATE_BYTES = 1 << 20

_SPECIAL_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

# Folder of further chat templates, by name.
_MORE_TEMPLATES = "additional_chat_templates"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Files that transformers can convert. Without one of these it may make an empty tokenizer.
_VOCABULARY_PATTERNS = ("*.model", "*.spm", "*.tiktoken", "vocab.json", "vocab.txt")


def read_tokenizer(folder: Path, model: Mapping[str, Any] | None = None) -> TokenizerFiles:
    """Reads the tokenizer of the model in `folder`; `model` is its config.json, if it was read before.

    The ids that end an answer are those of `generation_config.json`, `config.json` and the tokenizer's own
    end token, in this order, without repetition. The first of these files also has the recommended
    sampling.

    Raises:
      CheckpointError: a file is missing, oversized or malformed, or needs transformers to convert.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a Hugging Face model")
    special: dict[str, str] = {}
    text = _read_text(folder / "tokenizer.json")
    if text is None:
        text, special = _convert(folder)
    try:
        tokenizer = open_tokenizer(text)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error

    config = _read_json(folder / "tokenizer_config.json")
    for data in (_read_json(folder / "special_tokens_map.json"), config):
        for name in _SPECIAL_NAMES:
            # Plain text, or an object with a `content`.
            token = data.get(name)
            if isinstance(token, dict):
                token = token.get("content")
            if token is None:
                continue
            if not isinstance(token, str):
                raise CheckpointError(f"{folder}: {name} must be text or have a content, got {token!r:.80}")
            special[name] = token
    model = _read_json(folder / "config.json") if model is None else model
    models = [_read_json(folder / "generation_config.json"), model]

    eos_ids = [id_ for model in models for id_ in _ids(folder, model, "eos_token_id")]
    eos_ids += _named_id(tokenizer, special.get("eos_token"))
    bos_ids = _named_id(tokenizer, special.get("bos_token"))
    bos_ids += [id_ for model in models for id_ in _ids(folder, model, "bos_token_id")]
    template, templates = _chat_templates(folder, config)
    return TokenizerFiles(
        tokenizer_json=text,
        chat_template=template,
        templates=templates,
        special=special,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        bos_id=bos_ids[0] if bos_ids else None,
        sampling=_sampling(folder, models[0]),
        **_source_facts(folder, models, bos_ids),
    )


def write_tokenizer(folder: Path, files: TokenizerFiles) -> None:
    """Writes `files` so that `read_tokenizer` and transformers' AutoTokenizer read them.

    Writes `tokenizer.json`, `tokenizer_config.json` and, if there is a chat template, `chat_template.jinja`,
    replacing earlier ones. Ids in `eos_ids` besides the end token's belong in the model's `config.json`,
    which is not written here.

    Raises:
      OSError: the folder cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **files.special,
    }
    _write(folder / "tokenizer.json", files.tokenizer_json)
    _write(folder / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")
    template = folder / "chat_template.jinja"
    if files.chat_template is None:
        template.unlink(missing_ok=True)  # One of another model would be used with this tokenizer.
    else:
        _write(template, files.chat_template)
    for name, source in files.templates.items():
        (folder / _MORE_TEMPLATES).mkdir(exist_ok=True)
        _write(folder / _MORE_TEMPLATES / f"{name}.jinja", source)


def with_chat_template(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """A tokenizer with the chat template of a file for all conversations.

    Raises:
      ConfigError: the file cannot be read, is too long, or is no template.
    """
    # Here, because it imports Jinja.
    from jaxllm.text.template_program import parse

    try:
        source = read_text(path, _MAX_TEMPLATE_BYTES)
        parse(source)
    except (OSError, UnicodeDecodeError, ConfigError, TemplateError) as error:
        raise ConfigError(
            f"the chat template {path} cannot be read: {one_line(error)}; give a file of Jinja source"
        ) from error
    return Tokenizer(dataclasses.replace(tokenizer.files, chat_template=source, templates={}))


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode())


def _convert(folder: Path) -> tuple[str, dict[str, str]]:
    """The text of a `tokenizer.json` converted by transformers, and its special tokens."""
    if not any(match for pattern in _VOCABULARY_PATTERNS for match in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} has no tokenizer.json, nor a vocabulary to make one from; "
            "copy the tokenizer's files of the model into it"
        )
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and converting its vocabulary needs transformers; "
            "run: pip install 'jaxllm[convert]'"
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder.resolve()), trust_remote_code=False, local_files_only=True
        )
        text = tokenizer.backend_tokenizer.to_str()
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    except Exception as error:  # Conversion fails in many ways; AttributeError: no fast version.
        reason = one_line(error)
        raise CheckpointError(
            f"transformers cannot convert the tokenizer in {folder}: {reason}; "
            "pip install 'jaxllm[convert]' if a package is missing, else save a tokenizer.json with the "
            "program that made the model"
        ) from error
    return text, {name: token for name, token in special.items() if name in _SPECIAL_NAMES}


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The chat template, from the first of Hugging Face's locations that has one, the newest location first;
    and further ones by name."""
    named: dict[str, str] = {}
    template = config.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if template is not None and not isinstance(template, str):
        try:
            named = {entry["name"]: entry["template"] for entry in template}
        except (TypeError, KeyError) as error:
            raise CheckpointError(
                f"{folder}: chat_template must be text or a list of names and templates, "
                f"got {template!r:.80}; correct tokenizer_config.json"
            ) from error
        template = named.pop("default", None)
    more = folder / _MORE_TEMPLATES
    paths = sorted(more.glob("*.jinja"))[: MAX_TEMPLATES + 1] if more.is_dir() else []
    named |= {path.stem: _read_text(path) or "" for path in paths}
    bad = [name for name in named if not isinstance(name, str) or not _TEMPLATE_NAME.fullmatch(name)]
    if bad or len(named) > MAX_TEMPLATES:
        raise CheckpointError(
            f"{folder} has {len(named)} chat templates{f', one named {bad[0]!r:.80}' if bad else ''}; "
            f"at most {MAX_TEMPLATES} are read, with names of letters, digits and _"
        )
    text = _read_text(folder / "chat_template.jinja")
    template = template if text is None else text
    if template is None and len(named) == 1:
        template = next(iter(named.values()))
    if template is None and named:
        raise CheckpointError(
            f"{folder} has chat templates {sorted(named)} and none named 'default'; "
            "save the one to use as chat_template.jinja"
        )
    return template, named


def _ids(folder: Path, model: Mapping[str, Any], key: str) -> Iterator[int]:
    """The token ids at `key` of a config, which may be absent, one id or a list."""
    value = model.get(key)
    for id_ in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(id_, int) or isinstance(id_, bool):
            raise CheckpointError(f"{folder}: {key} must be a token id or a list, got {value!r:.80}")
        if id_ >= 0:  # Some configs have -1 for none.
            yield id_


def _sampling(folder: Path, config: Mapping[str, Any]) -> dict[str, float]:
    """The sampling in a `generation_config.json`; `do_sample` false is greedy."""
    found = {name: config[name] for name in MODEL_SAMPLING if config.get(name) is not None}
    # Some write it as a float, or -1 for all tokens.
    top_k = found.get("top_k")
    if type(top_k) is int or (isinstance(top_k, float) and top_k.is_integer()):
        found["top_k"] = max(0, int(top_k))
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        Sampling(**found)
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'generation_config.json'}: {error}; correct the file") from error
    return found


def write_sampling(folder: Path, files: TokenizerFiles) -> None:
    """Writes the recommended sampling of `files`, if any, for `read_tokenizer` and transformers; with begin
    and end tokens, which transformers then only reads from this file.

    Raises:
      OSError: the folder cannot be written.
    """
    if not files.sampling:
        return
    sampling = dict(files.sampling)
    sampled = sampling.get("temperature") != 0
    if not sampled:
        del sampling["temperature"]
    config = {
        "do_sample": sampled,
        **sampling,
        "bos_token_id": files.bos_id,
        "eos_token_id": [*files.eos_ids],
    }
    plain = {name: value for name, value in config.items() if value not in (None, [])}
    _write(folder / "generation_config.json", json.dumps(plain, indent=1) + "\n")


def _source_facts(
    folder: Path, models: Sequence[Mapping[str, Any]], bos_ids: Sequence[int]
) -> dict[str, Any]:
    """The start tokens of an encoder-decoder, and the prefixes of its sources; nothing for other models."""
    if not any(model.get("is_encoder_decoder") for model in models):
        return {}
    found: list[int] = []
    for key in ("decoder_start_token_id", "forced_bos_token_id"):
        ids = [id_ for model in models for id_ in _ids(folder, model, key)]
        # The first of them, because transformers prefers generation_config.json to config.json.
        found += ids[:1] or (list(bos_ids[:1]) if key == "decoder_start_token_id" else [])
    prefix = next((each["prefix"] for each in models if isinstance(each.get("prefix"), str)), "")
    # The prefixes of the tasks in a config, such as T5's; malformed entries are skipped.
    tasks = next((each["task_specific_params"] for each in models if "task_specific_params" in each), None)
    named = tasks.items() if isinstance(tasks, dict) else ()
    prefixes = ((name, each.get("prefix")) for name, each in named if isinstance(each, dict))
    kept = {name: each for name, each in prefixes if name.strip() and isinstance(each, str) and each.strip()}
    return {"start_ids": tuple(found), "source_prefix": prefix, "tasks": kept}


def _named_id(tokenizer: AnyTokenizer, token: str | None) -> list[int]:
    id_ = None if token is None else tokenizer.token_id(token)
    return [] if id_ is None else [id_]


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not path.exists():
        return {}
    return read_json(path, "fetch the file again", limit_bytes=MAX_FILE_BYTES)


def _read_text(path: Path) -> str | None:
    try:
        data = read_bytes(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error}); replace it by the model's own"
        ) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8 text (byte {error.start}); fetch the file again"
        ) from error
