"""Every family gives transformers' log-probabilities in every room that the table of families says it has.

Each room has one law here, and each family one tiny random model (see `Family`), whose compiled buckets its
laws share. The daily suite has every kind of layer in each room; the other families are a campaign
(`make test-all`).
TFLite's runtime has an environment of its own: its law is in `tests/export/test_families.py`.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm.serving.contexts.context
from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.bundle.levels import elastic_parts
from jaxllm.checkpoints.huggingface import read_config, read_params, write_folder
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.errors import BudgetExceeded
from jaxllm.export.contents import require_family
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import ProgramLevel
from jaxllm.export.programs.jax_programs import JaxPrograms
from jaxllm.export.programs.model import ProgramModel
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.stablehlo import traced
from jaxllm.export.subject import read_subject
from jaxllm.int8_prefill.fitting import random_calibration
from jaxllm.int8_prefill.reference import forward_by_rule, integer_rule, plain_rule
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder, encoder_decoder
from jaxllm.models.features import FEATURES, feature_refusal
from jaxllm.models.lora import LoraConfig, init_adapter, merge
from jaxllm.models.parameters import param_specs, sparse_layers
from jaxllm.serving.buckets.model import DecodeBucket, SampleBucket
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.evaluation.tasks import score_options
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.opening.weight_source import budget_with_experts
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.speculation.token_tree import TokenTree
from jaxllm.steps.trees import keep_path, read_nodes
from tests import tiny, tiny_hf
from tests.docs.families import TABLE, default_config
from tests.quick_jit import jit

pytest.importorskip("torch")
pytest.importorskip("transformers")

from jaxllm.models.architectures import ARCHITECTURES
from jaxllm.steps.branching import Branching

TOLERANCE = 1e-3


def drawn(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(3, tiny.VOCAB_SIZE, count).tolist()


CONTEXT, CHUNK = 64, 16
OPTIONS = EngineOptions(
    context_tokens=CONTEXT, cache_tokens=(CONTEXT,), chunk_tokens=(CHUNK,), decode_block=4,
    cache_dtype="float32", buckets_bytes=0,
)  # fmt: skip
LEVEL = 50
LADDER = Ladder(levels=(LEVEL, FULL_LEVEL))
PROMPT, NEXT = drawn(23), drawn(4, seed=1)
# Families whose variant has another name.
_VARIANTS = {"gemma3_text": "gemma3"}
# Of Switch Transformers no token is dropped, which would depend on how many are fed together.
_CHANGED: Mapping[str, Mapping[str, Any]] = {"switch_transformers": {"expert_capacity": 64}}


class Family:
    """One family's tiny model.

    Attributes:
      name: its model_type.
      folder: where its files are.
      cfg, params: of the model, in float32.
      path: of a bundle of it, with the level `LEVEL` where it can have levels.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        variant = _VARIANTS.get(name, name)
        changed = dict(_CHANGED.get(name, {}))
        if variant in tiny_hf.ENCODER_DECODERS:
            checkpoint = tiny_hf.save_encoder_decoder(
                variant, folder / "hf", vocab_size=tiny.VOCAB_SIZE, **changed
            )
        else:
            keys = tiny_hf.VARIANTS[variant][1]
            sized = ("vocab_size", "vocab_size_per_layer_input")
            keys = {key: tiny.VOCAB_SIZE if key in sized else value for key, value in keys.items()}
            checkpoint = tiny_hf.save(variant, folder / "hf", keys=keys)
        self.cfg = read_config(checkpoint)
        self.params = {name: np.asarray(value) for name, value in read_params(checkpoint, self.cfg)}
        self._references = {"whole": self._load(checkpoint)}
        self._opened = contextlib.ExitStack()
        self.path = self.write("whole", parts=elastic_parts(LADDER))

    def close(self) -> None:
        """Closes the engines."""
        self._opened.close()

    def write(self, name: str, weights: Any = "f32", **how: Any) -> Path:
        """Writes a bundle of the model."""
        tokenizer = tiny.tiny_tokenizer()
        if self.cfg.encoder is not None:
            tokenizer = dataclasses.replace(tokenizer, start_ids=(tiny.BEGIN_ID,))
        how = {"params": self.params, **how}
        return tiny.write_tiny_bundle(
            self.folder / f"{name}.jaxllm", weights, cfg=self.cfg, tokenizer=tokenizer, **how
        )

    def open(self, path: Path | None = None, *, filled: int = FULL_LEVEL, **changed: Any) -> Engine:
        """An engine that can prefill at the level `filled`, which is all that `error` asks for; closed with
        the family."""
        options = dataclasses.replace(OPTIONS, **changed)
        engine = Engine.open(path or self.path, options=options, warm_up=False)
        self._opened.callback(engine.close)
        runner = engine.at(filled).runner
        wanted = runner.buckets_for(CONTEXT // 2, CONTEXT // 2)
        runner.fill([each for each in wanted if not isinstance(each, DecodeBucket | SampleBucket)])
        return engine

    @functools.cached_property
    def engine(self) -> Engine:
        """With all weights in memory, adapters and contexts, as far as there are some."""
        rank = 0 if feature_refusal(self.cfg, "adapters") else 4
        codec = "" if feature_refusal(self.cfg, "contexts") else "raw"
        return self.open(adapter_rank=rank, kv_codec=codec)

    # -- transformers ------------------------------------------------------------------------------

    def reference(self, name: str, params: Mapping[str, np.ndarray]) -> str:
        """Has transformers load the model with other parameters; returns the name to give `scores`."""
        if name not in self._references:
            folder = self.folder / f"hf-{name}"
            write_folder(folder, self.cfg, params)
            self._references[name] = self._load(folder)
        return name

    def level_reference(self, level: int) -> str:
        """`reference` of a level: the whole model, in which the units that it lacks are zeros."""
        return self.reference(f"level-{level}", zeroed(self.params, sub_config(self.cfg, LADDER, level)))

    def scores(self, tokens: Sequence[int], source: Sequence[int] = (), of: str = "whole") -> np.ndarray:
        """transformers' log-probabilities `[T, V]` float64 after each of `tokens`, in a decoder those behind
        the source's, if there is one."""
        import torch

        model, rows = self._references[of], np.asarray([tokens], np.int64)
        if self.cfg.encoder is None:
            logits = tiny_hf.logits(model, rows)[0]
        else:
            ids = torch.from_numpy(np.asarray([source], np.int64))
            with torch.no_grad():
                out = model(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    decoder_input_ids=torch.from_numpy(rows),
                    use_cache=False,
                )
            logits = out.logits.numpy()[0]
        logits = logits.astype(np.float64)
        return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

    def _load(self, folder: Path) -> Any:
        return tiny_hf.load(folder) if self.cfg.encoder is None else tiny_hf.load_encoder_decoder(folder)

    def error(self, engine: Engine, *, of: str = "whole") -> float:
        """How far an engine's log-probabilities are from transformers', at most: those behind `PROMPT`, and
        behind each of some further tokens, which are fed one by one. Of an encoder-decoder the prompt is the
        source."""
        runner = engine.runner
        tokens, source = (PROMPT, []) if self.cfg.encoder is None else ([tiny.BEGIN_ID], PROMPT)
        wanted = self.scores([*tokens, *NEXT], source, of)[len(tokens) - 1 :]
        # Logits near each other would agree with anything.
        assert wanted.std() > 0.2
        with runner.lock:
            cache = runner.start(CONTEXT)
            cache = runner.read_source(cache, source) if source else cache
            found, fed = [], tokens
            for count in range(len(NEXT) + 1):
                logits, cache = prefill_prompt(runner, cache, fed, len(tokens) + count - len(fed))
                found.append(np.asarray(logits, np.float64)[0])
                fed = NEXT[count : count + 1]
        rows = np.stack(found)
        return float(np.abs(rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True) - wanted).max())


def zeroed(params: Mapping[str, np.ndarray], level: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters of the whole model in which the units that a level lacks are zeros."""
    specs, found = param_specs(level), {}
    for name, value in params.items():
        kept = tuple(map(slice, specs[name].shape))
        found[name] = np.zeros_like(value)
        found[name][kept] = value[kept]
    return found


# A tree of branches within branches: its tokens, and the node before each.
_NODES = drawn(8, seed=4)
_PARENTS = (-1, 0, 1, 0, 2, 3, 3, 6)


def tokens_to(node, parents=_PARENTS):
    """The tokens from a tree's root to a node."""
    return [] if node < 0 else [*tokens_to(parents[node], parents), _NODES[node]]


def token_tree(parents):
    """A tree of `_NODES`."""
    depths, ancestors = np.zeros(8, np.int32), np.eye(8, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            depths[node] = depths[parent] + 1
            ancestors[node] |= ancestors[parent]
    ones = np.ones(8, np.float32)
    return TokenTree(
        tokens=np.asarray(_NODES, np.int32), parents=np.asarray(parents, np.int32), depths=depths,
        confidences=ones, probabilities=ones, ancestors=ancestors, count=np.int32(8),
    )  # fmt: skip


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    made = Family(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


def least_budget(family):
    """Memory for no more of a family's weights than two of its largest pieces."""
    options = dataclasses.replace(OPTIONS, memory_bytes=1)
    with pytest.raises(BudgetExceeded) as caught:
        Engine.open(family.path, options=options, warm_up=False)
    return int(re.search(r"at least ([\d,]+)", str(caught.value))[1].replace(",", ""))


class TreeSteps:
    """The steps of token trees over a family's parameters, jitted once."""

    def __init__(self, family):
        cfg = family.cfg
        self.params = {name: jnp.asarray(value) for name, value in family.params.items()}

        @jit
        def prefill(params, tokens, valid, source):
            cache = new_cache(cfg, batch=1, tokens=CONTEXT, dtype=jnp.float32)
            if cfg.encoder is not None:
                encoder = encoder_decoder.encoder_params(params)
                length = np.int32(len(PROMPT))
                cache = encoder_decoder.read_source(params, encoder, source, length, cache, cfg=cfg)
            return decoder.forward(params, tokens, cache, cfg=cfg, valid=valid)[1]

        @jit
        def read(params, tree, nodes, valid, cache):
            if cfg.states is not None:
                cache = dataclasses.replace(cache, states=cache.states.with_nodes(tree.room))
            out, cache = read_nodes(params, tree, nodes, valid, cache, cfg=cfg, dtype=jnp.float32)
            return jax.nn.log_softmax(out), cache

        self._prefill, self._read, self._keep = prefill, read, jit(keep_path)

    def prefilled(self, tokens):
        row = np.zeros((1, CHUNK), np.int32)
        row[0, : len(tokens)] = tokens
        return self._prefill(self.params, row, np.int32(len(tokens)), np.asarray([PROMPT], np.int32))

    def read(self, cache, nodes, parents=_PARENTS):
        """Log-probabilities `[8, V]` after some nodes of a tree of `_NODES`, and the cache."""
        tree = token_tree(parents)
        ids = np.zeros(8, np.int32)
        ids[: len(nodes)] = nodes
        ids[len(nodes) :] = ids[len(nodes) - 1]
        out, cache = self._read(self.params, tree, ids, np.int32(len(nodes)), cache)
        return np.asarray(out), cache

    def keep(self, cache, path):
        nodes = np.zeros(8, np.int32)
        nodes[: len(path)] = path
        nodes[len(path) :] = path[-1]
        return self._keep(cache, nodes, np.int32(len(path)))


def in_memory(family):
    assert family.error(family.engine) < TOLERANCE


def streamed_weights(family):
    engine = family.open(memory_bytes=least_budget(family))
    assert engine.model.streamed is not None
    assert family.error(engine) < TOLERANCE


def levels(family):
    engine = family.open(levels=(LEVEL,), filled=LEVEL).at(LEVEL)
    assert engine.cfg != family.cfg
    assert family.error(engine, of=family.level_reference(LEVEL)) < TOLERANCE


def integer_prefill(family):
    """The rule of its products is the model in floats; the engine's is that rule in integers, and near it."""
    cfg, tokens = family.cfg, np.asarray(PROMPT, np.int32)
    floats = {name: jnp.asarray(value) for name, value in family.params.items()}

    def scores(hidden, params):
        return jax.nn.log_softmax(decoder.logits(params, hidden, cfg=cfg), axis=-1)

    @jit
    def by_rule(params):
        return scores(forward_by_rule(params, tokens, plain_rule(params, cfg), cfg=cfg), params)

    wanted = family.scores(PROMPT)
    assert np.abs(np.asarray(by_rule(floats)) - wanted).max() < TOLERANCE
    texts = np.random.default_rng(1).integers(0, tiny.VOCAB_SIZE, (4, 48)).astype(np.int32)
    calibration = random_calibration(cfg, floats, texts, shadows=1)
    path = family.write("int8", "int8", parts=prefill_parts(calibration))
    engine = family.open(path, prefill=PrefillOptions(mode="int8"))
    assert engine.prefill_mode(len(PROMPT)) == "int8"
    runner = engine.runner
    logits, _ = prefill_prompt(runner, runner.start(CONTEXT), PROMPT, 0)
    with Bundle.open(path) as bundle:
        params = bundle.load()
        layers = jax.tree.map(jnp.asarray, calibration.layers(FULL_LEVEL, cfg))

        @jit
        def in_integers(params, layers):
            rule = integer_rule(params, layers, cfg)
            return scores(forward_by_rule(params, tokens, rule, cfg=cfg), params)

        expected = np.asarray(in_integers(params, layers))[-1]
    found = np.asarray(jax.nn.log_softmax(logits[0]))
    assert np.abs(found - expected).max() < TOLERANCE
    # Eight bits of a tiny random model.
    assert np.abs(found - wanted[-1]).max() < 0.5 * wanted[-1].std()


def experts_apart(family):
    """Experts in floats, with room for some of them."""
    bits = np.full((len(sparse_layers(family.cfg)), family.cfg.experts), 32)
    path = family.write("apart", expert_bits=bits)
    with Bundle.open(path) as bundle:
        one = bundle.weight_bytes // (bits.size + 1)
        budget = budget_with_experts(bundle, OPTIONS.resolve(family.cfg), 3 * one)
    engine = family.open(path, memory_bytes=budget)
    assert engine.model.streamed is not None
    assert family.error(engine) < TOLERANCE


def drafter(family):
    """Nodes that are fed in two runs, and what goes on behind an accepted path, are as in their own
    sequences."""
    steps = TreeSteps(family)
    prompt = PROMPT[: CHUNK - 1]
    cache = steps.prefilled(prompt)
    first, cache = steps.read(cache, range(4))
    second, cache = steps.read(cache, range(4, 8))
    found = np.concatenate([first[:4], second[:4]])
    for node in range(8):
        expected = family.scores([*prompt, *tokens_to(node)], PROMPT)[-1]
        assert np.abs(found[node] - expected).max() < TOLERANCE, f"node {node}"
    # 0, 3, 6, 7
    cache = steps.keep(cache, np.array([0, 3, 6, 7]))
    line = np.arange(-1, 7)
    after, _ = steps.read(cache, range(2), parents=line)
    expected = family.scores([*prompt, *tokens_to(7), *_NODES[:2]], PROMPT)[-2:]
    assert np.abs(after[:2] - expected).max() < TOLERANCE


def contexts(family):
    """Opened again, chunks are read; those that were lost are computed again."""
    engine, cfg = family.engine, family.cfg
    wanted = [each for each in engine.runner.buckets_for() if not isinstance(each, DecodeBucket)]
    engine.runner.fill(wanted)
    # By measured times some chunks would be computed, others read.
    options = ContextOptions(folder=family.folder / "contexts", writing="ahead", recompute=False)
    turns = [(drawn(20), 18), (drawn(5, 1), 4), (drawn(3, 2), 4)]
    name, tokens = "", [tiny.BEGIN_ID] if cfg.encoder else []
    for number, (turn, count) in enumerate(turns):
        with contextlib.closing(Contexts(engine, options)) as kept:
            record = kept.record("mail", name) if name else kept.create("mail")
            context, name = Context(kept, record), record.name
            answer = context.generate(turn, max_tokens=count, ignore_eos=True).result()
            begun = [*tokens, *(() if cfg.encoder and not number else turn)]
            tokens = [*begun, *answer.tokens]
            scores = family.scores(tokens, context.source)[len(begun) - 1 : -1]
            for at, each in enumerate(answer.logprobs):
                for token, logprob in ((each.token, each.logprob), *each.top):
                    assert abs(logprob - scores[at][token]) < TOLERANCE, f"turn {number}, token {at}"
            found = answer.restoration
            if number == 1:
                assert found.read
                assert not found.computed
                kept.store.commit(kept.store.record(name).lose({0}))
            elif number == 2 and cfg.states is None:
                assert found.computed == (0,)
            elif number == 2:
                # Nothing but the first token gives states again.
                assert answer.reused_tokens == 0


def adapters(family):
    """Matrices that a family has as one get the sum of their ranks: three at most."""
    lora = LoraConfig(rank=1, alpha=2)
    zero = init_adapter(family.cfg, lora, jax.random.key(2))
    draw = np.random.default_rng(2)
    adapter = {name: draw.normal(size=each.shape).astype(np.float32) * 0.2 for name, each in zero.items()}
    write_adapter(family.folder / "adapter", family.cfg, lora, adapter)
    merged = {name: np.asarray(each) for name, each in merge(family.params, adapter, lora.scaling).items()}
    engine = family.engine
    engine.set_adapter(family.folder / "adapter")
    assert family.error(engine, of=family.reference("adapter", merged)) < TOLERANCE
    engine.set_adapter(None)
    assert family.error(engine) < TOLERANCE


def tasks(family):
    question = Branching(tuple(PROMPT), (tuple(drawn(3, 5)), tuple(drawn(1, 6)), tuple(drawn(5, 7))))
    (found,) = score_options(family.engine, [question])
    for branch, sum_ in zip(question.branches, found, strict=True):
        scores = family.scores([*PROMPT, *branch])[len(PROMPT) - 1 : -1]
        expected = np.take_along_axis(scores, np.array(branch)[:, None], axis=1).sum()
        assert abs(sum_ - expected) < TOLERANCE


def programs(family):
    """As StableHLO, of its bytes."""
    subject, cfg = read_subject(family.path), family.cfg
    require_family("stablehlo", "f32", cfg, levels=False)
    plan = ExportPlan(context_tokens=CONTEXT, chunk_tokens=(CHUNK,), cache_tokens=()).resolved(cfg)
    manifest = Manifest(
        format="live", name="tiny", model="", context_tokens=CONTEXT, precision="f32", cache_dtype="float32",
        platforms=("cpu",), levels={FULL_LEVEL: ProgramLevel(cfg=cfg, weights={})},
        signatures=tuple(plan.signatures(FULL_LEVEL, lambda name: "")), files={}, made_with={},
    )  # fmt: skip

    class Programs(JaxPrograms):
        def step(self, signature):
            program = traced(signature, subject, plan, precision="f32", platforms=("cpu",))
            return jax.export.deserialize(bytearray(program.serialize())).call

        def contents(self, signature):
            return signature.name

    weights = {FULL_LEVEL: subject.levels[FULL_LEVEL].views(subject.arrays)}
    executor = Programs(manifest, weights)
    engine = Engine(ProgramModel(executor, family.engine.tokenizer))
    assert family.error(engine) < TOLERANCE


LAWS = {
    "streamed weights": streamed_weights,
    "levels": levels,
    "integer prefill": integer_prefill,
    "separate experts": experts_apart,
    "drafter": drafter,
    "contexts": contexts,
    "adapters": adapters,
    "tasks": tasks,
    "programs": programs,
}

PAIRS = [
    (name, room)
    for name in sorted(ARCHITECTURES)
    for room in FEATURES
    if room in LAWS and not feature_refusal(default_config(name), room)
]


# Rooms whose own code attends, and hence has windows, sinks and relative positions of its own; and those that
# have each kind of weight by itself.
ATTENDING = ("memory", "integer prefill", "drafter", "contexts")
WEIGHING = ("memory", "streamed weights", "levels", "separate experts", "adapters", "programs")


def features_of(name, room):
    """What a family's layers have, as far as a room has code of its own for it."""
    cfg = default_config(name)
    whole = cfg.encoder is None
    found = {"decoder": whole, "encoder": not whole, "mixed": cfg.mixed is not None}
    found |= {f"{cfg.states and cfg.states.kind}": cfg.states is not None}
    if room in WEIGHING:
        found |= {"experts": cfg.experts, "shared": cfg.shared_expert_size, "capacity": cfg.expert_capacity}
    if room in ("memory", "adapters"):
        # Some matrices are stored as one, to which adapters are written.
        found |= {"classic": whole and cfg.norm == "layer"}
    if room == "drafter":
        found |= {"experts": cfg.experts}
    if room in ATTENDING:
        found |= {"windows": any(cfg.attention_windows), "sinks": cfg.sink_logits}
        found |= {"relative": cfg.relative_buckets}
    return {feature for feature, there in found.items() if there}


def families_of(room):
    """The families that a room is tested with daily: by name, those that have what none before has."""
    seen, found = set(), []
    for name in sorted(ARCHITECTURES):
        if room == "memory" or (name, room) in PAIRS:
            found += [name] if features_of(name, room) - seen else []
            seen |= features_of(name, room)
    return found


DAILY = {room: families_of(room) for room in ("memory", *LAWS)}


def case(name, room, *more):
    """A case of a family in a room; a campaign unless it is tested there daily."""
    return pytest.param(name, *more, marks=() if name in DAILY[room] else pytest.mark.campaign)


@pytest.mark.parametrize(("family", "room"), [case(*pair, pair[1]) for pair in PAIRS], indirect=["family"])
def test_laws(family, room, monkeypatch):
    # Answers in contexts tell log-probabilities, too.
    telling = functools.partial(GenerationConfig, top_logprobs=20)
    monkeypatch.setattr(jaxllm.serving.contexts.context, "GenerationConfig", telling)
    LAWS[room](family)


def test_the_table_claims_what_is_checked_here():
    """But for TFLite, whose law is elsewhere."""
    rows = [row.split("|")[1:-1] for row in TABLE.read().splitlines()]
    rooms = [cell.strip() for cell in rows[0][2:]]
    claimed = {
        (row[0].strip(" `"), room)
        for row in rows[2:]
        for room, cell in zip(rooms, row[2:], strict=True)
        if cell.strip() == "yes"
    }
    assert {pair for pair in claimed if pair[1] != "tflite"} == set(PAIRS)
    assert set(LAWS) | {"tflite"} == set(FEATURES)


@pytest.mark.parametrize("family", [case(name, "memory") for name in sorted(ARCHITECTURES)], indirect=True)
def test_in_memory(family):
    """And the variant has the rooms that its family has."""
    in_memory(family)
    assert [room for room in FEATURES if feature_refusal(family.cfg, room)] == [
        room for room in FEATURES if feature_refusal(default_config(family.name), room)
    ]
