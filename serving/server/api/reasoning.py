"""Reads what a request says about the model's reasoning: whether it shall think, how hard and how long."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxllm.serving.server.api.errors import ApiError
from jaxllm.text.answer_syntax import THINKING_SWITCHES, AnswerFormat

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reasoning:
    """What a request says about the model's reasoning.

    Attributes:
      wanted: whether the model shall think; None for the template's default.
      most_tokens: number of tokens after which the thought is closed; None for no limit.
      options: variables for the template.
    """

    wanted: bool | None = None
    most_tokens: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Switch(NamedTuple):
    """What one field says.

    Attributes:
      kind: "effort" (one of `EFFORTS`, a demand to think unless it is "none"), "level" (the same, for a model
        that thinks, and no demand), "wanted" (whether the model shall think), or "budget" (the maximum
        tokens of the thought; 0 for no thought, -1 for no limit).
      value: None if it says nothing.
      param: name of the field.
    """

    kind: Literal["effort", "level", "wanted", "budget"]
    value: Any
    param: str


def reasoning_of(
    answer_format: AnswerFormat, *switches: Switch, template_options: Mapping[str, Any] | None = None
) -> Reasoning:
    """Combines the switches of a request. Raises ApiError if a value is malformed, two contradict each other,
    or the model does not think and shall. `template_options`: the caller's own variables for the template."""
    own = dict(template_options or {})
    named = [
        Switch("wanted", own[name], f"chat_template_kwargs.{name}")
        for name in THINKING_SWITCHES
        if name in own
    ]
    said: Switch | None = None
    found: dict[str, Switch] = {}
    for each in (*switches, *named):
        if each.value is None:
            continue
        wanted = _checked(each)
        other = found.setdefault(each.kind, each)
        if said is not None and wanted is not None and said.value is not wanted:
            other = said
        elif other.value == each.value:
            other = None
        if other is not None:
            message = f"{other.param} and {each.param} contradict each other; send one"
            raise ApiError(message, param=each.param)
        if wanted is not None:
            said = said or Switch("wanted", wanted, each.param)
    level = found.get("effort", found.get("level"))
    most = found.get("budget")
    wanted = None if said is None else said.value
    if said is not None and wanted and not answer_format.thinks:
        message = f"the model does not reason: its chat template has no reasoning; leave {said.param} out"
        raise ApiError(message, code="unsupported_value", param=said.param)
    # A model without reasoning is not switched, and obeys a demand not to reason.
    options: dict[str, Any] = {}
    if answer_format.thinks and wanted is not None:
        options[THINKING_SWITCHES[0]] = wanted
    if answer_format.thinks and wanted is not False and level is not None and level.value != "none":
        options["reasoning_effort"] = level.value
    most_tokens = most.value if most is not None and most.value > 0 else None
    return Reasoning(wanted=wanted, most_tokens=most_tokens, options=options | own)


def _checked(switch: Switch) -> bool | None:
    """Whether a field demands that the model thinks; None if it does not say so."""
    value, at = switch.value, switch.param
    if switch.kind in ("effort", "level"):
        if value not in EFFORTS:
            raise ApiError(f"{at} is one of {', '.join(EFFORTS)}; got {value!r:.40}", param=at)
        return value != "none" if switch.kind == "effort" else None
    if switch.kind == "budget":
        if type(value) is not int or not -1 <= value < 1 << 31:
            raise ApiError(f"{at} is a number of tokens, 0 for none, -1 for no limit", param=at)
        return None if value == -1 else value > 0
    if not isinstance(value, bool):
        raise ApiError(f"{at} is true or false, got {value!r:.40}", param=at)
    return value
