"""TFLite models: what LiteRT answers, in which arithmetic, and how many bytes they take."""

import contextlib
import dataclasses
import shutil
from collections import Counter

import numpy as np
import pytest

from benchmarks.export.run import quantize_folder
from benchmarks.harness.children import Export
from jaxllm.errors import ConfigError, JaxllmError, ProgramError
from jaxllm.export.device.contexts import ProgramContexts
from jaxllm.export.folder_format.manifest import Manifest, StoredFile
from jaxllm.export.folder_format.parts import LEFT, RIGHT
from jaxllm.export.programs.litert import LiteRtExecutor, PackedFolder
from jaxllm.export.programs.litert_library import keep_programs
from jaxllm.export.programs.model import ProgramModel, open_program
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import Session
from jaxllm.text.tokenizer import Tokenizer
from tests.export.conftest import PLAN
from tests.export.models import CFG, CONFIG, CONTEXT, PROMPTS, answers, require_same_answers, with_drafts
from tests.export.operators import Operator, operators
from tests.tiny import tiny_params

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from jaxllm.export import tflite as exporter
from jaxllm.export.blocks import BLOCK, Blocks, in_blocks
from jaxllm.export.quantized import calibrate, quantized_subject
from jaxllm.export.tflite import FILE, export_tflite

# What may hold integers of 8 bits: products and what leads to and from them, and rows of the table.
INTEGER_OPERATORS = {
    "FULLY_CONNECTED", "QUANTIZE", "DEQUANTIZE", "RESHAPE", "TRANSPOSE", "EMBEDDING_LOOKUP",
}  # fmt: skip
SHORT = ExportPlan(context_tokens=CONTEXT, chunk_tokens=(16,), verify_tokens=(16,))
STATIC = dataclasses.replace(SHORT, static_verify=True)
TEXT = "the hello there " * 20


@pytest.fixture(scope="module")
def engine(tflite):
    return open_program(tflite[0], threads=1)


@pytest.fixture(scope="module")
def whole(elastic):
    return read_subject(elastic)


@pytest.fixture(scope="module")
def int8(subject, tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs") / "int8"
    export_tflite(subject, folder, SHORT, precision="int8")
    return folder


@pytest.fixture(scope="module")
def int4(subject, tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs") / "int4"
    export_tflite(subject, folder, SHORT, precision="int4")
    return folder


@pytest.fixture(scope="module")
def w8a8(whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs") / "w8a8"
    tokens = Tokenizer(whole.tokenizer).encode(TEXT)
    ranges = calibrate(quantized_subject(whole)[0], tokens[:40])
    export_tflite(whole, folder, STATIC, precision="w8a8", ranges=ranges)
    return folder


def test_the_answers_are_the_live_engines(engine, live):
    assert answers(engine) == live[100]
    assert answers(engine.at(40)) == live[40]


@pytest.mark.parametrize("level", [100, 40, 0])
def test_drafted_answers_are_those_without_drafts(engine, level):
    own = {"drafter": "level", "level": level} if level else {"drafter": "ngram"}
    counts = require_same_answers(with_drafts(engine, **own), engine)
    if level == 100:
        assert counts.acceptance_length > 2


def test_packed_weights_of_levels_are_not_taken_for_one_another(tflite, live, tmp_path, engine):
    """A level's matrices begin at the same bytes as the whole model's, which is how XNNPACK tells them."""
    manifest, store = Manifest.read(tflite[0]), PackedFolder(tmp_path, limit_bytes=1 << 30)
    for _ in ("packed now", "packed before"):
        executor = LiteRtExecutor(manifest, tflite[0], threads=1, packed=store)
        for level in (40, 100):
            assert answers(Engine(ProgramModel(executor, engine.tokenizer), level)) == live[level]
        (packed,) = tmp_path.iterdir()
        assert packed.stat().st_size > 10_000


def test_programs_are_opened_when_they_run(tflite, live, tmp_path, engine):
    """Those of one level and length together; the others' part of the file is none."""
    manifest, store = Manifest.read(tflite[0]), PackedFolder(tmp_path, limit_bytes=1 << 30)
    executor, counts = LiteRtExecutor(manifest, tflite[0], threads=1, packed=store), []
    for level in (100, 40, 100):
        assert answers(Engine(ProgramModel(executor, engine.tokenizer), level)) == live[level]
        counts.append(len(executor.opened_names))
    assert 2 <= counts[0] < counts[1] == counts[2] < len(manifest.signatures)
    # Those that nobody stores packed are all open at once, over one copy.
    assert len(LiteRtExecutor(manifest, tflite[0], stores=False).opened_names) == len(manifest.signatures)


def test_programs_are_kept_in_place(tflite):
    raw, draw = (tflite[0] / FILE).read_bytes(), np.random.default_rng(2)
    names = [each.name for each in Manifest.read(tflite[0]).signatures]
    for wanted in ({names[0]}, {names[-1], names[2]}, set()):
        model = bytearray(raw)
        keep_programs(model, wanted)
        assert len(model) == len(raw)
        assert operators(bytes(model)) == {
            name: found for name, found in operators(raw).items() if name in wanted
        }
    end = raw.index(b"TFL3") + 4096
    for _ in range(300):
        model = bytearray(raw)
        for at in draw.integers(0, end, 3):
            model[at] = draw.integers(0, 256)
        with contextlib.suppress(ProgramError):
            keep_programs(model[: draw.integers(8, len(raw))], {names[0]})


def test_weights_are_stored_once(tflite, subject):
    folder, sharing = tflite
    params = sum(value.nbytes for value in tiny_params(CFG).values())
    adapters = sum(array.nbytes for name, array in subject.arrays.items() if name.startswith("level_"))
    # Small buffers are not counted; the level's matrices of several widths would be half of the model's.
    assert sharing.stored_bytes < 1.03 * (params + adapters)
    assert sharing.apart_bytes > 1.1 * (params + adapters)
    assert (folder / FILE).stat().st_size == Manifest.read(folder).files[FILE].size_bytes


def test_a_levels_adapter_is_stored_at_half_precision_and_widened_once(tflite, subject):
    sides = [name for name in subject.levels[40].weights if name.endswith((LEFT, RIGHT))]
    for name, found in operators((tflite[0] / FILE).read_bytes()).items():
        halves = {each.name: count for each, count in found.items() if "FLOAT16" in each.inputs}
        if not name.startswith("level_40"):
            assert halves == {}, name
        elif "prefill" in name:
            # Of the last layer it needs keys and values alone.
            assert 0 < halves.pop("DEQUANTIZE") < len(sides)
            assert halves == {}
        else:
            assert halves == {"DEQUANTIZE": len(sides)}, name


def integers(found: Counter[Operator]) -> set[str]:
    return {each.name for each in found if "INT8" in (*each.inputs, each.output)}


def test_int8_has_weights_of_8_bits_and_nothing_else(int8):
    for name, found in operators((int8 / FILE).read_bytes()).items():
        products = {each: count for each, count in found.items() if each.name == "FULLY_CONNECTED"}
        assert {each.inputs for each in products} == {("FLOAT32", "INT8")}, name
        assert integers(found) == {"FULLY_CONNECTED", "EMBEDDING_LOOKUP"}, name
        assert not any(each.name == "DEQUANTIZE" for each in found), name


def test_int4_has_blocks_of_4_bits_that_levels_share(int4, int8, subject):
    """The head, whose products choose tokens, and adapters have 8 bits."""
    for name, found in operators((int4 / FILE).read_bytes()).items():
        products = Counter(each.inputs for each in found if each.name == "FULLY_CONNECTED")
        assert set(products) <= {("FLOAT32", "INT4"), ("FLOAT32", "INT8")}, name
        assert ("FLOAT32", "INT4") in products, name
    numbers = sum(int(np.prod(subject.arrays.shapes[name].shape)) for name in in_blocks(subject.cfg))
    saved = numbers - numbers // 2 - numbers // BLOCK * 2
    sizes = [(each / FILE).stat().st_size for each in (int8, int4)]
    # More than levels and scales save would be apart if each level had its own. (8-bit zero points go, too.)
    assert sizes[0] - sizes[1] >= saved


def test_blocks_err_no_more_than_plain_rounding():
    matrix = np.random.default_rng(0).standard_normal((6, 96)).astype(np.float32)
    matrix[1, 40:] = 0
    found = Blocks.of(matrix)
    assert np.abs(found.levels).max() == 7
    # XNNPACK reads 7 bits of a scale's mantissa.
    assert not np.any(found.scales.view(np.uint16) & 7)
    plain = np.abs(matrix.reshape(-1, 32)).max(-1, keepdims=True) / 7
    rounded = np.rint(matrix.reshape(-1, 32) / np.maximum(plain, 1e-9)) * plain
    error, most = (
        np.square(each.reshape(-1, 32) - matrix.reshape(-1, 32)).sum(-1) for each in (found.values, rounded)
    )
    # A scale of fewer bits is up to 0.4 % off.
    assert np.all(error <= 1.05 * most)
    assert error.sum() < 0.95 * most.sum()


def test_scales_are_written_once(int8):
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs((int8 / FILE).read_bytes(), 0)
    graphs = [model.Subgraphs(index) for index in range(model.SubgraphsLength())]
    tensors = [graph.Tensors(index) for graph in graphs for index in range(graph.TensorsLength())]
    tables = [each.Quantization() for each in tensors]
    uses = [(each.ScaleAsNumpy().tobytes(), each._tab.Pos) for each in tables if each and each.ScaleLength()]
    assert len({scales for scales, _ in uses}) == len(set(uses)) < len(uses) / 2


def test_w8a8_multiplies_integers_in_prefill_and_leaves_the_cache_alone(w8a8):
    for name, found in operators((w8a8 / FILE).read_bytes()).items():
        products = Counter()
        for each, count in found.items():
            if each.name == "FULLY_CONNECTED":
                products[each.inputs, each.output] += count
        # A prefill of the last layer needs its keys and values alone. Decoding has dynamic activations.
        prefill = {(("INT8", "INT8"), "INT8"): 7 * CFG.layers - 5}
        verify = {(("INT8", "INT8"), "INT8"): 7 * CFG.layers, (("FLOAT32", "INT8"), "FLOAT32"): 1}
        decode = {(("FLOAT32", "INT8"), "FLOAT32"): 7 * CFG.layers + 1}
        kind = name.rpartition("cache_")[2].lstrip("0123456789_").partition("_")[0]
        assert products == {"prefill": prefill, "verify": verify, "decode": decode}[kind], name
        assert integers(found) <= INTEGER_OPERATORS, name
        # Attention, the cache, norms and activations are in floats.
        for each in found:
            if each.name in ("BATCH_MATMUL", "DYNAMIC_UPDATE_SLICE", "SOFTMAX", "MUL", "ADD", "LOGISTIC"):
                assert "INT8" not in (*each.inputs, each.output), (name, each)


@pytest.mark.parametrize(
    ("name", "within", "level"),
    [("int8", 0.01, 100), ("int8", 0.01, 40), ("int4", 0.03, 100), ("int4", 0.03, 40), ("w8a8", 0.02, 100)],
)
def test_perplexity_is_near_that_of_floats(request, engine, name, within, level):
    """Of random weights, whose perplexity is near the vocabulary's size: it says that nothing is wrong with
    scales, not what they cost a trained model."""
    quantized = open_program(request.getfixturevalue(name), threads=1)
    tokens = PROMPTS[4]
    loss = [-each.at(level).runner.score(tokens[:-1], tokens[1:]).mean() for each in (engine, quantized)]
    assert loss[0] != loss[1]
    assert abs(np.exp(loss[1] - loss[0]) - 1) < within


def test_narrow_caches_lose_little_and_are_widened_where_they_are_read(narrow, engine):
    dtype = Manifest.read(narrow).cache_dtype
    share, within = {"float16": (1 / 2, 1e-4), "int8": ((1 + 4 / CFG.head_dim) / 4, 0.01)}[dtype]
    found = open_program(narrow, threads=1)
    sizes = [each.model.executor.manifest.cache_bytes(100, CONTEXT) for each in (found, engine)]
    assert sizes[0] == sizes[1] * share
    tokens = PROMPTS[4]
    loss = [-each.runner.score(tokens[:-1], tokens[1:]).mean() for each in (engine, found)]
    assert abs(np.exp(loss[1] - loss[0]) - 1) < within
    for name, counted in operators((narrow / FILE).read_bytes()).items():
        writes = {each.output for each in counted if each.name == "DYNAMIC_UPDATE_SLICE"}
        assert writes == {dtype.upper()}, name
    # One query has fewer scores than the cache has numbers.
    counted = operators((narrow / FILE).read_bytes())["decode"]
    products = {each.inputs[0] for each in counted if each.name == "BATCH_MATMUL"}
    assert products == {"FLOAT16" if dtype == "float16" else "FLOAT32"}


def test_a_context_in_narrow_caches_goes_on_after_a_restart(narrow, tmp_path):
    engine, turns, session = open_program(narrow, threads=1), (PROMPTS[2], PROMPTS[1]), Session()
    first = engine.stream(turns[0], CONFIG, session=session).result()
    second = engine.stream([*first.sequence, *turns[1]], CONFIG, session=session).result()
    contexts = ProgramContexts(engine, tmp_path / "store", budget_bytes=1 << 20)
    name = contexts.create("app").name
    found = [Context(contexts, contexts.record("app", name)).answer(turns[0], CONFIG).result().tokens]
    contexts.close()
    contexts = ProgramContexts(open_program(narrow, threads=1), tmp_path / "store", budget_bytes=1 << 20)
    answer = Context(contexts, contexts.record("app", name)).answer(turns[1], CONFIG).result()
    contexts.close()
    assert [*found, answer.tokens] == [first.tokens, second.tokens]
    assert answer.restoration.read


# What is refused


def test_precisions_and_their_text(whole, tmp_path):
    with pytest.raises(ConfigError, match="not bf16"):
        export_tflite(whole, tmp_path / "x", PLAN, precision="bf16")
    with pytest.raises(ConfigError, match="calibrate"):
        export_tflite(whole, tmp_path / "x", SHORT, precision="w8a8")
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_model(tflite, tmp_path):
    manifest = Manifest.read(tflite[0])
    (tmp_path / FILE).write_bytes(b"no model")
    with pytest.raises(ProgramError, match="checksum"):
        LiteRtExecutor(manifest, tmp_path)
    files = {**manifest.files, FILE: StoredFile.of(tmp_path / FILE)}
    with pytest.raises(ProgramError, match="is damaged"):
        LiteRtExecutor(dataclasses.replace(manifest, files=files), tmp_path)


def test_the_peer_that_quantizes_our_float_model(tflite, live, tmp_path):
    """The same programs, at 8 bits."""
    pytest.importorskip("ai_edge_quantizer")
    floats = tflite[0]
    quantize_folder(Export(floats, 0, 0.0), tmp_path / "int8")
    before, after = Manifest.read(floats), Manifest.read(tmp_path / "int8")
    assert (before.precision, after.precision) == ("f32", "int8")
    assert after.signatures == before.signatures
    assert after.files[FILE].size_bytes < 0.75 * before.files[FILE].size_bytes
    found = answers(open_program(tmp_path / "int8", threads=1))
    assert [len(each) for each in found] == [len(each) for each in live[100]]
    broken = shutil.copytree(floats, tmp_path / "broken")
    (broken / FILE).write_bytes(b"\0" * (broken / FILE).stat().st_size)
    with pytest.raises(JaxllmError, match="ai-edge-quantizer failed"):
        quantize_folder(Export(broken, 0, 0.0), tmp_path / "other")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_wrong_matrix_in_the_last_layer_is_found_behind_what_rounding_loses(
    precision, whole, tmp_path, monkeypatch
):
    layer = whole.cfg.layers - 1
    # Of the model as it is compared, so that the file has another matrix.
    stored = exporter.as_stored

    def other(subject, precision):
        made = stored(subject, precision)
        arrays = dict(made.arrays)
        arrays[f"layers.{layer}.attn.v"] = -arrays[f"layers.{layer}.attn.v"]
        return dataclasses.replace(made, arrays=arrays)

    monkeypatch.setattr(exporter, "as_stored", other)
    with pytest.raises(ProgramError, match=rf"differs from its step by [\d.]+% in kv_cache_v_{layer}"):
        export_tflite(whole, tmp_path / "programs", SHORT, precision=precision)
