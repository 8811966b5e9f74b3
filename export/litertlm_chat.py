"""Adapts a chat template to LiteRT-LM's renderer, and compares its rendered chats with the service's.

The runtime passes every content as a list of parts, has no text for special tokens, keeps a template's last
newline, and puts the start token before the rendered text. With an adapted template a chat has the same
tokens as in the service.
"""

import contextlib
import datetime
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxllm.errors import ConfigError, TemplateError, one_line
from jaxllm.text.tokenizer import Tokenizer

# For a model without a chat template: the contents of messages one after the other.
_PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Contents as texts. Parts of the runtime's own are texts and results of tools.
_TEXTS = """
{% if message.content is defined and message.content is sequence and message.content is not string %}
{% for part in message.content %}
{% if part is string %}{% set runtime.text = runtime.text + part %}
{% elif part.type == 'text' %}{% set runtime.text = runtime.text + part.text %}
{% elif part.type == 'tool_response' and part.response is string %}
{% set runtime.text = runtime.text + part.response %}
{% elif part.type == 'tool_response' %}{% set runtime.text = runtime.text + (part.response | tojson) %}
{% else %}{{ raise_exception('this model reads texts, not parts of the type ' ~ part.type) }}{% endif %}
{% endfor %}
{% set runtime.messages = runtime.messages + [dict(message, content=runtime.text)] %}
"""
# Contents as lists, for a template that only reads lists.
_PARTS = """
{% if message.content is string %}
{% set part = dict(type='text', text=message.content) %}
{% set runtime.messages = runtime.messages + [dict(message, content=[part])] %}
"""
_MESSAGES = """
{% set runtime = namespace(messages=[], text='') %}
{% for message in messages %}
{% set runtime.text = '' %}
CONTENTS
{% else %}{% set runtime.messages = runtime.messages + [message] %}{% endif %}
{% endfor %}
{% set messages = runtime.messages %}
"""
# Between block tags and the model's own template: tags would strip its first line's white space.
_EDGE = "{{ '' }}"
_WITHOUT_BOS = "{{ rendered[bos_token | length:] if rendered.startswith(bos_token) else rendered }}"
_SYSTEM = {"role": "system", "content": "Be brief."}
_TURNS = [
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": "Yes, since noon."},
    {"role": "user", "content": "Then I stay at home."},
]
_Turns = Sequence[Mapping[str, str]]


def runtime_template(tokenizer: Tokenizer) -> str:
    """The chat template of a `.litertlm` file with this tokenizer."""
    # Jinja drops one newline at a template's end.
    source = _EDGE + (tokenizer.chat_template or _PLAIN).removesuffix("\n")
    if _bos_text(tokenizer):
        source = f"{{% set rendered %}}{source}{_EDGE}{{% endset %}}{_WITHOUT_BOS}"
    named = "".join(
        f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}"
        for name, text in tokenizer.files.special.items()
        if name.isidentifier()
    )
    contents = _PARTS if tokenizer.chat_reads_parts_alone else _TEXTS
    return (named + _MESSAGES.replace("CONTENTS", contents)).replace("\n", "") + source


def require_same_chats(bundle: Path, tokenizer: Tokenizer) -> None:
    """Opens a file by the runtime, and compares its rendered chats with the service's.

    Raises:
      ConfigError: the runtime does not open it, cannot render a chat, or renders another text.
      TemplateError: the service cannot render a chat either.
    """
    now = datetime.datetime.now()
    chats = [_TURNS[:1]]
    for turns in (_TURNS, [_SYSTEM, *_TURNS]):
        # Some templates refuse a system's turn, or any but one question.
        with contextlib.suppress(TemplateError):
            _service_text(turns, tokenizer, now)
            chats.append(turns)
    for turns, found in zip(chats, _runtime_texts(bundle, chats), strict=True):
        wanted = _service_text(turns, tokenizer, now)
        if found != wanted:
            how = f"renders a chat as {found!r:.200}" if found else "cannot render a chat (its log says why)"
            raise ConfigError(
                f"by the model's chat template LiteRT-LM {how}, the service renders {wanted!r:.200}; prepare "
                "the model again with a template that both render alike"
            )


def _bos_text(tokenizer: Tokenizer) -> str:
    """Returns the text of the start token, if the runtime adds one."""
    return tokenizer.files.special.get("bos_token", "") if tokenizer.adds_bos else ""


def _service_text(turns: _Turns, tokenizer: Tokenizer, now: datetime.datetime) -> str:
    """Returns the text after the start token in the service's prompt."""
    if not tokenizer.has_chat_template:
        return "".join(turn["content"] for turn in turns)
    return tokenizer.render_chat(turns, now=now).removeprefix(_bos_text(tokenizer))


def _runtime_texts(bundle: Path, chats: Sequence[_Turns]) -> list[str]:
    """Returns the texts that the runtime renders; empty if it fails, with the reason in its log."""
    import litert_lm

    litert_lm.set_min_log_severity(litert_lm.LogSeverity.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine = litert_lm.Engine(str(bundle), backend=litert_lm.Backend.CPU(), cache_dir=folder)
            return [
                engine.create_conversation(messages=earlier).render_message_to_string(last)
                for *earlier, last in chats
            ]
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"LiteRT-LM does not open the model: {one_line(error)}") from error
