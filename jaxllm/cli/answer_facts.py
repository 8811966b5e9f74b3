"""Summarizes answers and drafts as JSON, for programs to read."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.serving.engine.answer import Answer
    from jaxllm.serving.engine.decoding import Drafts


def answer_facts(answer: "Answer") -> dict[str, Any]:
    """Text, tokens and times of a finished answer; times in milliseconds."""
    tokens, timings = len(answer.tokens), answer.timings
    tpot_ms = timings.tpot_ms(tokens)
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_string": answer.stop_string,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "completion_tokens": tokens,
        "seed": answer.seed,
        "ttft_ms": round(timings.ttft_ms, 3),
        "tpot_ms": round(tpot_ms, 3),
        "decode_tokens_per_s": round(1000 / tpot_ms, 1) if tpot_ms else None,
    }


def draft_facts(speculation: "Drafts | None") -> dict[str, Any]:
    """Counts of drafts, and whether drafting is faster (None: not measured yet); empty without
    speculation."""
    if speculation is None:
        return {}
    counts, payoff = speculation.counts, speculation.payoff
    drafted_ms, plain_ms = payoff.token_ms, payoff.plain_token_ms
    return {
        "drafts": {
            "drafter": speculation.options.drafter,
            "pays": payoff.pays,
            "drafted_token_ms": None if drafted_ms is None else round(drafted_ms, 3),
            "plain_token_ms": None if plain_ms is None else round(plain_ms, 3),
            "verifications": counts.verifications,
            "acceptance_length": round(counts.acceptance_length, 2),
            "useful_share": round(counts.useful_share, 3),
            "plain_tokens": counts.plain_tokens,
        }
    }
