"""Formats of models whose templates do not show them: calls that a template leaves out of the history, or
that the model writes in another way than the template. Each is chosen by markers in the template's source."""

import dataclasses

from jaxllm.text.answer_syntax import GENERIC, AnswerFormat, CallSyntax

_PYTHON = CallSyntax(arguments="python", middle="(", words=("True", "False", "None"))
_JSON_LIST = dataclasses.replace(GENERIC, opening="", closing="", separator=", ")

# Liquid AI's LFM2: Python calls in a list.
LFM2 = dataclasses.replace(_PYTHON, section=("<|tool_call_start|>[", "]<|tool_call_end|>"), separator=", ")
# Ai2's OLMo 3: a Python call on each line.
OLMO3 = dataclasses.replace(_PYTHON, section=("<function_calls>\n", "\n</function_calls>"), separator="\n")
# IBM's Granite 3: a list after a special token.
GRANITE3 = dataclasses.replace(_JSON_LIST, section=("<|tool_call|>[", "]"))
# Microsoft's Phi-4-mini: the list in two special tokens.
PHI4 = dataclasses.replace(_JSON_LIST, section=("<|tool_call|>[", "]<|/tool_call|>"))
# Llama 3.2 and 4 write Python calls, too, where their instructions have them.
LLAMA_PYTHON = dataclasses.replace(_PYTHON, section=("[", "]"), separator=", ")
# OpenAI's harmony: the model names the recipient after the channel, its template before it.
HARMONY = CallSyntax(
    opening="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    closing="<|call|>",
    separator="<|start|>assistant",
)
_HARMONY_TEXTS = ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>")

# Markers in a template's source that all must be there, and the syntax of calls.
_LEFT_OUT: tuple[tuple[tuple[str, ...], CallSyntax], ...] = (
    (("<|tool_list_start|>",), LFM2),
    (("List of tools: [", "keep_past_thinking"), LFM2),
    (("<function_calls>", "<functions>"), OLMO3),
    (("<|tool_call|>", "<|/tool_call|>"), PHI4),
    (("<|tool_call|>",), GRANITE3),
)
_NOT_READ = (("]<]minimax[>[", "calls are trees of elements named by their keys, which are not read"),)


def adjusted(source: str, found: AnswerFormat) -> AnswerFormat:
    """A format as far as it was found, with what is known of its model."""
    if "<|channel|>analysis" in source and "<|channel|>commentary" in source:
        template = tuple(
            dataclasses.replace(each, opening=f" {each.opening.lstrip()}", closing="<|call|>")
            for each in found.calls
        )
        return dataclasses.replace(
            found,
            thought_opening="<|channel|>analysis<|message|>",
            thought_closing="<|end|>",
            joint="<|start|>assistant",
            text_openings=_HARMONY_TEXTS,
            text_closings=("<|end|>", "<|return|>"),
            calls=(HARMONY, *_without_constraint(HARMONY), *template),
        )
    if not found.calls:
        syntax = next((each for marks, each in _LEFT_OUT if all(mark in source for mark in marks)), None)
        if syntax is None and "xml_tools" in source:
            syntax = GENERIC
        if syntax is not None:
            return dataclasses.replace(found, calls=(syntax,), writes_calls=False)
    elif not found.calls[0].opening and "Environment: ipython" in source:
        found = dataclasses.replace(found, calls=(*found.calls, LLAMA_PYTHON))
    note = next((text for mark, text in _NOT_READ if mark in source), found.note)
    return dataclasses.replace(found, note=note)


def _without_constraint(syntax: CallSyntax) -> tuple[CallSyntax, ...]:
    """Other ways of writing it that the model has: without the constraint, or with its name alone."""
    return tuple(dataclasses.replace(syntax, middle=middle) for middle in ("<|message|>", " json<|message|>"))
