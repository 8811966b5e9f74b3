"""Defines the options of the HTTP front: limits of requests, and what requests mean that do not say."""

import dataclasses
import math

from jaxllm.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """Options of the HTTP front.

    Attributes:
      body_bytes: most bytes of a request's body.
      image_body_bytes: the same where the model reads images, which bodies hold in base64.
      body_depth: most levels of nested lists and objects in a body.
      body_s: most seconds until a body has arrived.
      write_s: most seconds that a client may leave a part of an answer unread.
      answers_per_request: most answers that one request may ask for, as prompts times `n`.
      embeddings_per_request: most inputs of a request for embeddings.
      stored_responses, stored_response_bytes: most responses that are kept of an app, and most bytes of them.
      max_tokens: of answers whose request names no length; completions have 16, as OpenAI has it.
      temperature: of requests that name none.
    """

    body_bytes: int = 4 << 20
    image_body_bytes: int = 16 << 20
    body_depth: int = 64
    body_s: float = 30.0
    write_s: float = 60.0
    answers_per_request: int = 16
    embeddings_per_request: int = 256
    stored_responses: int = 1000
    stored_response_bytes: int = 16 << 20
    max_tokens: int = 1024
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            least = 0 if field.name == "temperature" else 1
            if not number or value < least or (field.type is int and not isinstance(value, int)):
                raise ConfigError(f"{field.name} must be a number from {least} up, got {value!r:.80}")
