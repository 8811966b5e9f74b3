"""The configuration of rotary position embeddings."""

import dataclasses
from typing import Literal, get_args

from jaxllm.config_checks import MAX_DIMENSION, require, require_flags, require_int, require_numbers

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoPE, arXiv 2104.09864) with its length scaling.

    `dim` is the number of leading head dimensions that are rotated: even, at most the head size. `kind` is
    the `rope_type` of Hugging Face configs: linear (position interpolation), llama3 (Llama 3.1, piecewise by
    wavelength), yarn (arXiv 2309.00071) or proportional (Gemma 4: only the pairs of the first `rotated_dim`
    dimensions turn, the others have a frequency of zero). The other fields are the parameters of these
    scalings, under the names that Hugging Face configs give them. With `query_growth` b above 0 the query at
    position p is multiplied by 1 + b·ln(1 + floor(p / `original_window_tokens`)) (Llama 4, Ministral 3).
    `factors`, one per pair of dimensions, divide the frequencies, as GGUF files store a scaling.
    """

    dim: int
    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_window_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    query_growth: float = 0.0
    factors: tuple[float, ...] = ()
    rotated_dim: int = 0

    def __post_init__(self) -> None:
        require_int("rope dim", self.dim, 2, MAX_DIMENSION)
        require(self.dim % 2 == 0, f"rope dim must be even, got {self.dim}")
        require_numbers(
            self, "theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
            "attention_factor", "query_growth",
        )  # fmt: skip
        self._check_factors()
        require(self.query_growth >= 0, f"query_growth must not be negative, got {self.query_growth}")
        require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        require(self.factor >= 1, f"rope scaling factor must be at least 1, got {self.factor}")
        require(
            self.kind in get_args(RopeKind),
            f"rope scaling {self.kind!r} is not supported; use one of {', '.join(get_args(RopeKind))}",
        )
        turned = (2, self.dim) if self.kind == "proportional" else (0, 0)
        require_int("rotated_dim", self.rotated_dim, *turned)
        require(self.rotated_dim % 2 == 0, f"rotated_dim must be even, got {self.rotated_dim}")
        shortest = 1 if self.kind in ("llama3", "yarn") or self.query_growth else 0
        require_int("rope original window", self.original_window_tokens, shortest, MAX_DIMENSION)
        require_flags(self, "truncate")
        if self.kind == "llama3":
            require(
                self.high_freq_factor > self.low_freq_factor,
                "llama3 rope scaling needs high_freq_factor > low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}",
            )
        if self.kind == "yarn":
            require(self.theta > 1, f"yarn rope scaling needs theta above 1, got {self.theta}")
            require(
                min(self.beta_fast, self.beta_slow) > 0,
                "yarn rope scaling needs positive beta_fast and beta_slow, got "
                f"{self.beta_fast} and {self.beta_slow}",
            )

    def _check_factors(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        valid = all(isinstance(each, float) and 1e-6 <= each <= 1e6 for each in self.factors)
        require(
            valid and len(self.factors) in (0, self.dim // 2),
            f"rope factors must be {self.dim // 2} numbers in [1e-6, 1e6], got {self.factors!r:.80}",
        )
