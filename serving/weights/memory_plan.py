"""Plans a memory budget: the memory of a model besides its weights, the pieces that are resident, and those
that are read in each pass."""

import dataclasses
import math
from collections.abc import Sequence

from jaxllm.bundle import Bundle
from jaxllm.config import ModelConfig
from jaxllm.errors import BudgetExceeded
from jaxllm.experts.mixture import visit_rows
from jaxllm.kernels import native
from jaxllm.kernels.native_products import begun_shape
from jaxllm.kv.states import states_bytes
from jaxllm.layer_configs import layer_config, shares_kv
from jaxllm.nn.documents import BLOCK_TOKENS
from jaxllm.serving.buckets.source import source_lengths
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions

# Slots for pieces that are not resident: one is computed while the next one is read. With more of them more
# layers would run together, but each uses the memory of a resident piece, which is then read in each pass.
SLOTS = 2

# Buckets of a model of a billion parameters need some 50 MB when loaded from disk; more when compiled.
_RUNTIME_BYTES, _RUNTIME_SHARE = 64 << 20, 5


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """The memory limit of a model and everything around it.

    Attributes:
      total_bytes: limit for everything.
      fixed_bytes: bytes of everything but weights: caches, activations, a drafter, the runtime's share.
      fixed_parts: names of the fixed parts, for messages.
    """

    total_bytes: int
    fixed_bytes: int
    fixed_parts: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The division of a memory budget.

    Attributes:
      fixed_bytes: bytes of everything but pieces: caches, activations, a drafter.
      slots: number of slots, shared by the pieces that are read in each pass; 0 if all are resident.
      resident: numbers of the resident pieces, ascending.
    """

    budget_bytes: int
    fixed_bytes: int
    slots: int
    slot_bytes: int
    resident: tuple[int, ...]
    resident_bytes: int

    @property
    def planned_bytes(self) -> int:
        """Bytes of the budget in use."""
        return self.fixed_bytes + self.slots * self.slot_bytes + self.resident_bytes


def plan_memory(
    sizes: Sequence[int],
    budget: MemoryBudget,
    *,
    slot_bytes: int = 0,
    slots: int = SLOTS,
    order: Sequence[int] | None = None,
) -> MemoryPlan:
    """Makes as many pieces resident as fit, spread evenly among the others, so that reads never pause.

    Args:
      sizes: sizes of all pieces, in bytes, in the order of a pass.
      budget: budget, including the fixed part.
      slot_bytes: bytes of a piece while it is computed, if more than its resident size.
      slots: maximum number of slots for pieces that are not resident; at least two.
      order: order of making pieces resident while they fit; None for all spread evenly.

    Raises:
      BudgetExceeded: two pieces do not fit.
    """
    budget_bytes, room = budget.total_bytes, budget.total_bytes - budget.fixed_bytes
    resident, largest = list(range(len(sizes))), max(slot_bytes, *sizes)
    if sum(sizes) <= room:
        slots = largest = 0
    else:
        slots = max(SLOTS, min(slots, room // largest))
        room -= slots * largest
        if room < 0:
            least = least_budget(budget_bytes, -room)
            raise BudgetExceeded(
                f"a memory budget of {budget_bytes:,} bytes is too small: this model needs at least "
                f"{least:,} ({least - SLOTS * largest:,} for {budget.fixed_parts}, {SLOTS} times "
                f"{largest:,} for its largest layers); give more, or ask for a shorter context"
            )
        resident = []
        for number in spread_evenly(len(sizes)) if order is None else order:
            if sizes[number] <= room:
                resident.append(number)
                room -= sizes[number]
    return MemoryPlan(
        budget_bytes=budget_bytes,
        fixed_bytes=budget.fixed_bytes,
        slots=slots,
        slot_bytes=largest,
        resident=tuple(sorted(resident)),
        resident_bytes=sum(sizes[number] for number in resident),
    )


def spread_evenly(count: int) -> list[int]:
    """The numbers [0, count) in an order whose every prefix is spread evenly: van der Corput's sequence."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(f"{each:0{bits}b}"[::-1], 2) for each in range(1 << bits))
    return [each for each in reversed_bits if each < count]


def runtime_bytes(budget_bytes: int) -> int:
    """The runtime's share of a budget."""
    return min(_RUNTIME_BYTES, budget_bytes // _RUNTIME_SHARE)


def whole_budget(needed_bytes: int) -> int:
    """The minimum budget that leaves `needed_bytes` besides the runtime's share."""
    budget = needed_bytes
    while budget - runtime_bytes(budget) < needed_bytes:
        budget += needed_bytes - (budget - runtime_bytes(budget))
    return budget


def least_budget(budget_bytes: int, missing_bytes: int) -> int:
    """The smallest sufficient budget if `budget_bytes` lacks `missing_bytes`; the runtime's share grows with
    it."""
    return whole_budget(budget_bytes - runtime_bytes(budget_bytes) + missing_bytes)


_FLOAT_BYTES = 4
# Rows of a vocabulary for each tip that drafts: logits, probabilities, and their order.
_DRAFT_LOGITS = 3
# Rows of a vocabulary besides the logits of a tree's nodes, one of which is sampled at a time: counts, and
# without kernels probabilities, their order, and random numbers.
_SETTLED_LOGITS, _SETTLED_WITHOUT_KERNELS = 3, 17
# Copies of the scores of the encoder's pairs of tokens, for a block of queries: the additive terms, before
# and after the softmax, and packed for products.
_SCORE_COPIES = 5
# Buckets of an encoder's layers around its experts, besides the decoder's, which are in the runtime's share:
# measured with Switch-base-64, 36 buckets of 1.4 MB.
_ENCODER_BUCKETS_BYTES, _ENCODER_BUCKETS_SHARE = 24 << 20, 8


def nested_experts(bundle: Bundle) -> bool:
    """Whether there are separately stored nested experts."""
    tensors = bundle.layout.tensors.items() if bundle.layout.experts_apart else ()
    return any(".experts." in name and each.low is not None for name, each in tensors)


def drafter_bytes(speculation: SpeculationOptions, context_tokens: int, target: ModelConfig) -> int:
    """Memory of the drafter that options name; weights of a level of the target are not counted.
    `context_tokens` is the length of each context, 0 for the longest.

    Raises:
      CheckpointError: the drafter's model cannot be opened.
    """
    if speculation.drafter in ("level", "nested"):
        options = draft_options(target, speculation, context_tokens).resolve(target, quantized=True)
        if speculation.drafter == "level" or (speculation.level and target.experts):
            return fixed_bytes(target, options, drafts=True)
        # It drafts in the target's cache, some tips at a time.
        rows = _layer_rows(target) + _DRAFT_LOGITS * target.vocab_size
        return speculation.trees.tips * rows * _FLOAT_BYTES
    if speculation.model is None:
        return 0
    with open_model(speculation.model) as bundle:
        quantized = bundle.layout.weights not in ("f32", "bf16")
        asked = draft_options(bundle.cfg, speculation, context_tokens)
        resolved = asked.resolve(bundle.cfg, quantized=quantized)
        return bundle.weight_bytes + fixed_bytes(bundle.cfg, resolved, drafts=True)


def draft_options(cfg: ModelConfig, speculation: SpeculationOptions, context_tokens: int) -> EngineOptions:
    """Options of a drafter for a target's contexts."""
    return EngineOptions(
        context_tokens=min(context_tokens, cfg.window_tokens) if context_tokens else 0,
        trees=speculation.trees,
    )


def fixed_bytes(cfg: ModelConfig, options: EngineOptions, *, drafts: bool = False) -> int:
    """Maximum bytes of caches and activations of one request; `drafts` for a drafter."""
    # A source is read before the answer's tokens.
    activations = max(activation_bytes(cfg, options, drafts=drafts), source_bytes(cfg, options))
    return cache_bytes(cfg, options) + activations


def cache_bytes(cfg: ModelConfig, options: EngineOptions) -> int:
    """Bytes of the longest cache and the next shorter one, which coexist while a cache grows; each with the
    keys and values of a source, in an encoder-decoder."""
    # Not from NumPy, which has no bfloat16.
    width = {"float32": 4}.get(options.cache_dtype, 2)
    widths = sum(
        cfg.units(layer).kv_heads * layer_config(cfg, layer).head_dim
        for layer in range(cfg.layers)
        if not cfg.is_state(layer) and not shares_kv(cfg, layer)
    )
    caches = options.cache_tokens[-2:]
    rows = sum(caches) + len(caches) * options.source_tokens(cfg)
    return 2 * widths * width * rows + 2 * states_bytes(cfg)


def outputs_bytes(cfg: ModelConfig, options: EngineOptions) -> int:
    """Bytes of the outputs of a mixture's experts, before their sum, for a prompt as long as the context."""
    longest = options.chunk_tokens[-1]
    return -(-options.context_tokens // longest) * _visits_bytes(cfg, longest)


def around_experts_bytes(bundle: Bundle, options: EngineOptions) -> int:
    """Bytes of separately stored experts' buffers besides the experts."""
    cfg = bundle.cfg
    found = outputs_bytes(cfg, options)
    if cfg.encoder is not None:
        found += min(_ENCODER_BUCKETS_BYTES, bundle.weight_bytes // _ENCODER_BUCKETS_SHARE)
    if nested_experts(bundle):
        # A token's partial results.
        shape = begun_shape(cfg.experts_per_token, cfg.expert_ffn_size, cfg.hidden_size)
        found += _FLOAT_BYTES * math.prod(shape)
    return found


def _visits_bytes(cfg: ModelConfig, tokens: int) -> int:
    """Bytes of the outputs of a layer's experts for `tokens` tokens; 0 without experts."""
    pairs = tokens * cfg.experts_per_token
    return visit_rows(pairs, cfg.experts) * cfg.hidden_size * _FLOAT_BYTES if cfg.experts else 0


def source_bytes(cfg: ModelConfig, options: EngineOptions) -> int:
    """Bytes of activations of the longest source in the encoder: inputs and outputs of layers, one layer's
    intermediates, and scores of a block of queries with their additive terms; 0 without an encoder."""
    if cfg.encoder is None:
        return 0
    tokens = source_lengths(cfg, options)[-1]
    scores = _SCORE_COPIES * cfg.encoder.heads * min(BLOCK_TOKENS, tokens) * tokens
    rows = 2 * cfg.hidden_size + _layer_rows(cfg.encoder)
    return (scores + tokens * rows) * _FLOAT_BYTES + _visits_bytes(cfg.encoder, tokens)


def _layer_rows(cfg: ModelConfig) -> int:
    neurons = max(cfg.units(layer).neurons for layer in range(cfg.layers))
    sizes = [layer_config(cfg, layer) for layer in range(cfg.layers)]
    heads = max((each.heads + 2 * each.kv_heads) * each.head_dim for each in sizes)
    inputs = 0 if cfg.mixed is None else cfg.layers * cfg.mixed.layer_input_size
    return 4 * cfg.hidden_size + 3 * neurons + 2 * heads + 3 * inputs


def activation_bytes(cfg: ModelConfig, options: EngineOptions, *, drafts: bool = False) -> int:
    """Bytes of activations of a prompt as long as the context: the layers' inputs and outputs, one layer's
    intermediates for a chunk, and logits, of a token tree if there are trees."""
    width = _FLOAT_BYTES if options.activation_dtype == "float32" else 2
    hidden = options.context_tokens * cfg.hidden_size * width
    computed = options.chunk_tokens[-1] * _layer_rows(cfg) * _FLOAT_BYTES
    trees, rows_of_logits = options.trees, 2
    if trees is not None and drafts:
        rows_of_logits = _DRAFT_LOGITS * trees.tips
    elif trees is not None:
        by_kernel = native.kernels().native
        rows_of_logits = trees.nodes[-1] + (_SETTLED_LOGITS if by_kernel else _SETTLED_WITHOUT_KERNELS)
    logits = rows_of_logits * cfg.vocab_size * _FLOAT_BYTES
    visits = _visits_bytes(cfg, options.chunk_tokens[-1])
    return 2 * hidden + computed + visits + logits
