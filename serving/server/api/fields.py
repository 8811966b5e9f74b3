"""Declares each field of each format: bodies have the fields that are done, dialects the synonyms, hints and
refused fields of the clients and servers that speak a format. Parsers and tests come from here, and what
docs/guides/service-api.md lists (`python -m tests.serving.server.api.field_docs`).
"""

from typing import Annotated, Any, Literal

import msgspec

from jaxllm.serving.engine.decoding import MAX_TOP_LOGPROBS
from jaxllm.serving.server.api.context_edits import ContextManagement
from jaxllm.serving.server.api.dialect import Dialect, Values
from jaxllm.serving.server.api.errors import ApiError

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
LogitBias = dict[str, float] | list[tuple[int | str, float | bool]]
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]
_MostIds = Annotated[list[Natural], msgspec.Meta(max_length=64)]
# No answer is longer than the window.
_UNLIMITED = 1 << 30


class Extensions(msgspec.Struct, kw_only=True):
    """Our extensions, and those of other servers, accepted in every format."""

    slo: str | dict[str, Any] | None = None
    slo_first_token: Literal["answer", "reasoning"] | None = None
    strict: bool | None = None
    shorten: bool | None = None
    conversation: str | dict[str, Any] | None = None
    adapter: str | None = None
    grammar: str | dict[str, Any] | None = None
    prompt_cache_key: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    task: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    return_progress: bool | None = None
    ignore_eos: bool = False
    min_tokens: Natural = 0
    stop_token_ids: _MostIds | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    strict_fields: bool | None = None


class SamplingFields(Extensions, kw_only=True):
    """Sampling fields of OpenAI's formats, and our extensions."""

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's `stream_options`; `continuous_usage_stats` is vLLM's."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: bool = False


class ReasoningFields(msgspec.Struct, kw_only=True):
    """OpenRouter's `reasoning` of chats."""

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None


class OpenAIBody(SamplingFields, kw_only=True):
    """What chats and completions of OpenAI's format share."""

    n: Positive = 1
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    logit_bias: LogitBias | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: TopLogprobs | None = None
    timings_per_token: bool = False

    @property
    def usage_options(self) -> StreamOptions:
        """`stream_options`, or its defaults; raises ApiError without a stream."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options requires stream to be true", param="stream_options")
        return self.stream_options or StreamOptions()


class ChatBody(OpenAIBody, kw_only=True):
    """A chat of OpenAI's format."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningFields | None = None


class CompletionBody(OpenAIBody, kw_only=True):
    """A completion of OpenAI's format."""

    prompt: str | list[Any]
    logprobs: TopLogprobs | None = None
    suffix: str = ""
    echo: bool = False
    level: int | None = None

    @property
    def scores_only(self) -> bool:
        """Whether nothing is generated."""
        return self.max_tokens == 0

    @property
    def with_scores(self) -> bool:
        """Whether log-probabilities of the prompts are asked for."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)


class TextFormat(msgspec.Struct, kw_only=True):
    """Format of the text: `text`, `json_object`, or a `json_schema` with a name and a schema."""

    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextFields(msgspec.Struct, kw_only=True):
    """OpenAI's `text`."""

    format: TextFormat | None = None


class SummaryFields(msgspec.Struct, kw_only=True):
    """OpenAI's `reasoning` of responses, with a budget in tokens."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    max_tokens: int | None = None

    @property
    def summarized(self) -> bool:
        """Whether the thought comes as the summary of its item, where clients show it, rather than as its
        content. Nothing shortens it."""
        return (self.summary or self.generate_summary or "none") != "none"


class ResponseBody(SamplingFields, kw_only=True):
    """A response of OpenAI's format."""

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    max_output_tokens: Positive | None = None
    text: TextFields = msgspec.field(default_factory=TextFields)
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    safety_identifier: str | None = None
    user: str | None = None
    reasoning: SummaryFields = msgspec.field(default_factory=SummaryFields)


class Choosing(msgspec.Struct, kw_only=True):
    """Anthropic's `tool_choice`; `name` is the name of a tool."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice has a name if it is of the type tool, and only then")


class Thinks(msgspec.Struct, kw_only=True):
    """Anthropic's `thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """Anthropic's `output_config.format`."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """Anthropic's `output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(SamplingFields, kw_only=True):
    """What Anthropic's counting of tokens reads."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: Choosing | None = None
    thinking: Thinks | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    # With a value of Anthropic's own.
    service_tier: Literal["auto", "default", "flex", "priority", "standard_only"] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class MessagesBody(CountBody, kw_only=True):
    """Anthropic's messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None


class Options(msgspec.Struct, kw_only=True):
    """Ollama's `options`."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    num_ctx: int | None = None
    stop: str | list[str] | None = None
    repetition_penalty: float | None = msgspec.field(default=None, name="repeat_penalty")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaBody(Extensions, kw_only=True):
    """Fields of both paths of Ollama."""

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: Options = msgspec.field(default_factory=Options)
    keep_alive: str | int | float | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """A chat of Ollama's format."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[Any] | None = None
    # Of clients that make Ollama's bodies of OpenAI's.
    tool_choice: str | dict[str, Any] | None = None


class GenerateBody(OllamaBody, kw_only=True):
    """A completion of Ollama's format."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    images: list[str] | None = None
    suffix: str = ""
    context: list[Natural] = msgspec.field(default_factory=list)


class EmbedBody(msgspec.Struct, kw_only=True):
    """Embeddings of Ollama's format; `prompt` is of the older path."""

    model: str
    input: str | list[str] = msgspec.field(default_factory=list)
    prompt: str = ""
    truncate: bool = True
    strict_fields: bool | None = None


class ShowBody(msgspec.Struct, kw_only=True):
    """Facts of a model in Ollama's format."""

    model: str
    verbose: bool = False


class PullBody(msgspec.Struct, kw_only=True):
    """A model to load, in Ollama's format."""

    model: str
    stream: bool = True


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """A request for embeddings."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    strict_fields: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None


# Of any format: what other servers call the same thing.
_GRAMMARS = {
    "structured_outputs": "grammar", "guided_json": "grammar.json", "guided_regex": "grammar.regex",
    "guided_choice": "grammar.choice", "guided_grammar": "grammar.gbnf", "regex": "grammar.regex",
    "json_schema": "grammar.json", "ebnf": "grammar.gbnf",
}  # fmt: skip
_SYNONYMS = _GRAMMARS | {
    "repeat_penalty": "repetition_penalty", "lora_path": "adapter",
}  # fmt: skip
_LENGTHS = {"n_predict": "max_tokens", "max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
# Of vLLM, llama.cpp's server, LM Studio, SGLang and OpenRouter: how a server works, not what it answers.
_HINTS = frozenset({
    "cache_prompt", "cache_salt", "chat_format", "data_parallel_rank", "draft_model", "id_slot",
    "keep_alive", "metadata", "mm_processor_kwargs", "n_cache_reuse", "n_discard", "n_keep",
    "parse_tool_calls", "prediction", "priority", "prompt_cache_options", "prompt_cache_retention",
    "provider", "repeat_last_n", "request_id", "response_fields", "return_token_ids", "return_tokens", "rid",
    "route", "safety_identifier", "samplers", "slot_id", "spaces_between_special_tokens", "speculative",
    "stream_reasoning", "t_max_predict_ms", "thinking_forced_open", "timings_per_token", "transforms", "ttl",
    "usage", "user", "verbosity", "vllm_xargs",
})  # fmt: skip
_REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],), "bad_words": ([],), "chat_template": (), "documents": ([],),
    "dry_multiplier": (0,), "dynatemp_range": (0,), "early_stopping": (False,),
    "include_reasoning": (True,), "include_stop_str_in_output": (False,), "input_ids": (),
    "kv_transfer_params": (), "length_penalty": (1,), "logits_processors": ([],), "lora": ([],),
    "min_keep": (0,), "mirostat": (0,), "mirostat_mode": (0,), "n_probs": (0,), "no_stop_trim": (False,),
    "post_sampling_probs": (False,), "prompt_embeds": (), "reasoning_format": ("auto", "deepseek"),
    "return_hidden_states": (False,), "return_tokens_as_token_ids": (False,), "separate_reasoning": (True,),
    "session_params": (), "skip_special_tokens": (True,), "stop_regex": ([],), "tfs_z": (1,),
    "top_a": (0,), "top_n_sigma": (-1, 0), "truncation_side": ("left",), "typical_p": (1,),
    "use_beam_search": (False,), "xtc_probability": (0,),
}  # fmt: skip
_VALUES: Values = {
    "max_tokens": {-1: _UNLIMITED}, "max_completion_tokens": {-1: _UNLIMITED}, "top_k": {-1: 0},
    "seed": {-1: None}, "stop": {"": []},
}  # fmt: skip
_OLLAMA_SYNONYMS = _GRAMMARS | {
    "max_tokens": "options.num_predict", "max_output_tokens": "options.num_predict",
    "options.repetition_penalty": "options.repeat_penalty",
}  # fmt: skip
_OLLAMA_HINTS = _HINTS - {"keep_alive"} | {"shift", "truncate"} | {
    f"options.{name}"
    for name in (
        "draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta",
        "mirostat_tau", "num_batch", "num_gpu", "num_gqa", "num_keep", "num_thread", "numa",
        "penalize_newline", "repeat_last_n", "rope_frequency_base", "rope_frequency_scale", "use_mlock",
        "use_mmap", "vocab_only",
    )
}  # fmt: skip
_OLLAMA_REFUSED = _REFUSED | {"options.mirostat": (0,), "options.tfs_z": (1,), "options.typical_p": (1,)}
_OLLAMA_VALUES: Values = {
    "options.num_predict": {-1: _UNLIMITED, -2: _UNLIMITED}, "options.top_k": {-1: 0},
    "options.seed": {-1: None}, "options.stop": {"": []},
}  # fmt: skip

CHAT = Dialect(
    name="chats", body=ChatBody, synonyms=_SYNONYMS | _LENGTHS, values=_VALUES,
    hints=_HINTS - {"timings_per_token"}
    | {"store", "messages.provider_specific_fields", "tools.cache_control"},
    refused=_REFUSED | {
        "audio": (), "function_call": ("none",), "functions": ([],), "modalities": (["text"],),
        "moderation": (), "plugins": ([],), "web_search_options": (),
    },
)  # fmt: skip
COMPLETION = Dialect(
    name="completions", body=CompletionBody, synonyms=_SYNONYMS | _LENGTHS, values=_VALUES,
    hints=_HINTS - {"timings_per_token"}, refused=_REFUSED | {"best_of": (1,)},
)  # fmt: skip
RESPONSE = Dialect(
    name="responses", body=ResponseBody, values=_VALUES,
    synonyms=_SYNONYMS | {"max_tokens": "max_output_tokens"},
    hints=_HINTS - {"metadata", "safety_identifier", "user"}
    | {"client_metadata", "stream_options", "text.verbosity"},
    refused=_REFUSED | {
        "access_programs": (), "background_options": (), "context_management": ([],), "image": (),
        "max_tool_calls": (), "moderation": (), "prompt": (),
    },
)  # fmt: skip
_ANTHROPIC: dict[str, Any] = {
    "synonyms": _SYNONYMS, "values": _VALUES,
    "hints": _HINTS | {"cache_control", "inference_geo", "speed", "thread", "tools.cache_control"},
    "refused": _REFUSED | {"container": (), "mcp_servers": ([],)},
}  # fmt: skip
MESSAGES = Dialect(name="messages", body=MessagesBody, **_ANTHROPIC)
COUNT = Dialect(name="counts", body=CountBody, **_ANTHROPIC)
OLLAMA_CHAT = Dialect(
    name="Ollama's chats", body=OllamaChatBody, synonyms=_OLLAMA_SYNONYMS, values=_OLLAMA_VALUES,
    hints=_OLLAMA_HINTS, refused=_OLLAMA_REFUSED,
)  # fmt: skip
GENERATE = Dialect(
    name="Ollama's completions", body=GenerateBody, synonyms=_OLLAMA_SYNONYMS, values=_OLLAMA_VALUES,
    hints=_OLLAMA_HINTS, refused=_OLLAMA_REFUSED | {"template": ("",)},
)  # fmt: skip
EMBED = Dialect(
    name="Ollama's embeddings", body=EmbedBody, refused={"dimensions": ()},
    hints=frozenset({"keep_alive", "options"}),
)  # fmt: skip
EMBEDDING = Dialect(
    name="embeddings", body=EmbeddingBody, hints=frozenset({"user", "priority", "request_id"}),
    refused={"dimensions": (), "add_special_tokens": (True,)},
)  # fmt: skip
SHOW = Dialect(name="Ollama's facts", body=ShowBody, synonyms={"name": "model"})
PULL = Dialect(name="Ollama's pull", body=PullBody, synonyms={"name": "model"}, hints=frozenset({"insecure"}))
DIALECTS: tuple[Dialect[Any], ...] = (
    CHAT, COMPLETION, RESPONSE, MESSAGES, COUNT, OLLAMA_CHAT, GENERATE, EMBEDDING,
    EMBED,
)  # fmt: skip
