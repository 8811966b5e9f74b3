"""Low-rank adapters of a service: named by calls, loaded while it runs, and never mixed up; also where the
model drafts, or is read from storage."""

import concurrent.futures
import dataclasses
import shutil

import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.errors import BudgetExceeded
from jaxllm.models.lora import LoraConfig
from jaxllm.sampling import Sampling
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.server import executor as executors
from jaxllm.serving.server.opening import Adapters, engine_shape
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.weights.memory_plan import fixed_bytes, whole_budget
from tests.models.test_lora import random_adapter
from tests.serving.server.services import (
    FOX,
    FULL_LEVEL,
    call,
    facts,
    idle,
    made,
    make_executor,
    said,
    slowly,
    streamed,
    together,
    written,
)
from tests.tiny import END_ID, TINY, write_tiny_bundle

GREEDY = Sampling(logit_bias=((END_ID, -100.0),))


@pytest.fixture
def operator(served):
    return served.http("admin")


def completed(http, adapter="", tokens=24, prompt=FOX, **more):
    more |= {"adapter": adapter} if adapter else {}
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": tokens, **FULL_LEVEL, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(http, adapter="", **more):
    return completed(http, adapter, **more)["choices"][0]["text"]


def alone(served, name, prompt, tokens):
    """The tokens of an engine that has one adapter, or none."""
    options, engine = served.executor.adapters.options, served.service.engine
    served.without_adapter()

    def work():
        engine.set_adapter(options.adapter[name] if name else None)
        try:
            return engine.stream(prompt, GenerationConfig(max_tokens=tokens, sampling=GREEDY)).result()
        finally:
            engine.set_adapter(None)

    return served.executor.work("test", work).result(60)


def test_calls_name_adapters_and_get_their_answers(served, http):
    wanted = {name: alone(served, name, FOX, 24).text for name in ("", "formal", "terse")}
    assert len(set(wanted.values())) == 3
    # Back and forth, so that each comes after each.
    for name in ("formal", "", "terse", "formal", "terse", "", "formal"):
        told = completed(http, name)
        assert told["choices"][0]["text"] == wanted[name]
        assert told["jaxllm"].get("adapter", "") == name
    assert text(http, model="tiny:formal") == wanted["formal"]
    for wrong in ({"adapter": "none"}, {"model": "tiny:none"}):
        refused = http.post("/v1/completions", json={"prompt": FOX, **wrong})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "adapter_not_found")
    contrary = http.post("/v1/completions", json={"prompt": FOX, "model": "tiny:formal", "adapter": "terse"})
    assert contrary.status_code == 400
    models = [each["id"] for each in http.get("/v1/models").json()["data"]]
    assert models == ["tiny", "tiny:formal", "tiny:terse"]

    # Embeddings are of the model without adapters, whatever call came before.
    def embedded(model, status=200):
        answer = http.post("/v1/embeddings", json={"input": FOX, "model": model})
        assert answer.status_code == status, answer.text
        return answer.json().get("data")

    found = []
    for name in ("", "formal"):
        text(http, name)
        found.append(embedded("tiny"))
    assert found[0] == found[1]
    embedded("tiny:formal", 400)


def test_rows_of_one_adapter_are_decoded_together_and_others_apart(served, http, monkeypatch, compiles):
    names = ("", "", "formal", "formal", "terse", "terse")
    wanted = {name: text(http, name, tokens=40) for name in set(names)}
    seen, real = [], executors.decode_together

    def counted(runs):
        seen.append((served.executor.adapters._used, len(runs)))
        return real(runs)

    monkeypatch.setattr(executors, "decode_together", counted)
    with compiles() as count, slowly(monkeypatch), concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda name: text(served.http("mail"), name, tokens=40), names))
        assert count() == 0
    assert found == [wanted[name] for name in names]
    assert {name for name, rows in seen if rows == 2} == {"", "formal", "terse"}


def test_a_context_has_its_adapter(served, http):
    name = made(http, adapter="formal")
    told = http.get(f"/v1/contexts/{name}").json()
    assert told["adapter"] == "formal"
    first = facts(http, name, FOX, 20)
    assert first["adapter"] == "formal"
    record = served.service.contexts.store.record(name)
    assert list(record.tokens[-20:]) == alone(served, "formal", list(record.tokens[:-20]), 20).tokens
    # Others' turns between, in a context without one.
    plain = made(http)
    facts(http, plain, FOX, 20)
    again = facts(http, name, "and the dog?", adapter="formal")
    assert again["reused_tokens"] >= 32
    for own, asked, said_of in ((name, "terse", "the adapter 'formal'"), (plain, "terse", "no adapter")):
        refused = said(http, own, "and?", adapter=asked)
        assert refused.status_code == 400
        assert f"was made with {said_of}" in refused.json()["error"]["message"]
    assert http.post("/v1/contexts", json={"adapter": "none"}).status_code == 404
    assert http.post(f"/v1/contexts/{name}/pin", json={}).json()["pinned"]
    served.restart()
    assert served.service.contexts.store.verify() == []
    assert facts(http, name, [5, 6])["reused_tokens"] >= 32


def test_operators_load_and_unload_while_it_answers(served, http, operator, monkeypatch, compiles):
    body = {"name": "late", "folder": "other"}
    for refused in (http.post("/v1/adapters", json=body), http.delete("/v1/adapters/formal")):
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_operator")
    with slowly(monkeypatch), streamed(http, made(http)) as lines, compiles() as count:
        next(lines)
        loaded = operator.post("/v1/adapters", json=body)
        assert loaded.status_code == 201, loaded.text
        found = text(http, "late")
        assert count() == 0
        assert [*lines][-2].startswith("data: [DONE]")
    assert loaded.json()["id"] == "late"
    assert found not in {text(http, name) for name in ("", "formal", "terse")}
    listed = http.get("/v1/adapters").json()["data"]
    assert [(each["id"], each["size_bytes"] > 0) for each in listed][2:] == [("late", True)]
    assert operator.post("/v1/adapters", json=body).status_code == 409
    more = operator.post("/v1/adapters", json={"name": "more", "folder": "other"})
    assert (more.status_code, more.json()["error"]["code"]) == (507, "budget_exceeded")
    assert b'jaxllm_adapter_bytes{adapter="late"}' in served.backend.metrics.text()
    name = made(http, adapter="late")
    with slowly(monkeypatch), streamed(http, name) as lines:
        next(lines)
        busy = operator.delete("/v1/adapters/late")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "adapter_busy")
        assert [*lines][-2].startswith("data: [DONE]")
    idle(served)
    assert operator.delete("/v1/adapters/late").json()["deleted"]
    assert operator.delete("/v1/adapters/late").status_code == 404
    assert http.post("/v1/completions", json={"prompt": FOX, "adapter": "late"}).status_code == 404
    # The context waits for its adapter, by whatever name.
    gone = said(http, name, "and?")
    assert (gone.status_code, "is not loaded" in gone.text) == (404, True)
    assert http.get(f"/v1/contexts/{name}").json()["adapter"] == loaded.json()["digest"]
    assert operator.post("/v1/adapters", json={"name": "other"}).status_code == 201
    back = facts(http, name, "and?")
    assert (back["adapter"], "moved" in back) == ("other", False)
    assert operator.delete("/v1/adapters/other").status_code == 200
    # Or goes on with another one that a call names.
    moved = facts(http, name, "and?", adapter="terse")
    assert (moved["adapter"], moved["moved"], moved["reused_tokens"]) == ("terse", ["adapter"], 0)
    assert facts(http, name, "and?")["adapter"] == "terse"


def test_only_folders_of_adapters_are_loaded_and_names_are_plain(served, operator, tmp_path):
    root = served.executor.adapters.options.adapters
    shutil.copytree(root / "other", tmp_path / "elsewhere")
    (root / "empty").mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    folders = ("nothing", "..", ".", "../adapters", "/etc", "link", "empty", "\0", "x" * 5000, "~")
    names = ("", "a/b", "..", "a:b", "é", "x" * 65, "-a")
    for name, folder in (*(("bad", each) for each in folders), *((each, "other") for each in names)):
        refused = operator.post("/v1/adapters", json={"name": name, "folder": folder})
        assert refused.status_code == 400, (name, folder, refused.text)
    assert served.executor.adapters.names == ("formal", "terse")


def test_options_say_what_the_engine_must_take(served, tmp_path):
    bundle = served.service.engine.model.bundle.path
    given = dict(served.executor.adapters.options.adapter)

    def shape(**options):
        return engine_shape(ServerOptions(model=str(bundle), **options))

    assert shape() == (0, (), 0)
    terse = shape(adapter={"terse": given["terse"]})
    # As much as it takes in the end, where all matrices are adapted.
    (loaded,) = (each for each in served.executor.adapters.facts() if each.name == "terse")
    own = tuple(each for each in LoraConfig.targets if not each.startswith("cross."))
    assert terse == (2, own, loaded.size_bytes // 2)
    whole = shape(adapter={"terse": given["terse"]}, levels=(100,))
    assert whole[2] == loaded.size_bytes // 4
    assert shape(adapter=given)[0] == 4
    assert shape(adapters=tmp_path) == (16, LoraConfig.targets, 0)
    assert shape(adapters=tmp_path, adapter_rank=3, adapter_targets=("attn.q",)) == (3, ("attn.q",), 0)

    # A limit of memory is told.
    few = ServerOptions(adapter=given, adapter_memory=1000)
    with pytest.raises(BudgetExceeded, match="of at most 1,000"):
        served.executor.work("test", lambda: Adapters(served.service.engine.model, few)).result(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "layers"), [("drafts", TINY.layers), pytest.param("streamed", 8, marks=pytest.mark.campaign)]
)
def test_each_call_has_its_adapter_and_drafts_are_told(tmp_path, how, layers):
    cfg = TINY if layers == TINY.layers else dataclasses.replace(TINY, layers=layers, attention_windows=())
    asked = call(FOX, tokens=20)
    path, given, lora = write_tiny_bundle(tmp_path / "tiny.jaxllm", cfg=cfg), {}, LoraConfig(rank=2, alpha=16)
    for seed, name in enumerate(("formal", "terse")):
        given[name] = tmp_path / name
        write_adapter(given[name], cfg, lora, random_adapter(cfg, lora, seed))
    options = EngineOptions(
        context_tokens=64, cache_tokens=(64,), chunk_tokens=(16,), decode_block=4, buckets_bytes=0,
        adapter_rank=2,
    )  # fmt: skip
    engine, wanted = Engine.open(path, options=options), {}
    for name, folder in {"": None, **given}.items():
        engine.set_adapter(folder)
        wanted[name] = engine.generate(asked.prompt, asked.config).tokens
    engine.close()
    assert len({tuple(each) for each in wanted.values()}) == 3
    drafts, dispatches = None, []
    if how == "drafts":
        shape = TreeShape(nodes=(4, 8), room=16)
        drafts = SpeculationOptions(model=path, trees=shape, pausing=False, fallback="fixed", alpha=1e-6)
    else:
        budget = fixed_bytes(cfg, options.resolve(cfg, quantized=False)) + path.stat().st_size // 2
        options = dataclasses.replace(options, memory_bytes=whole_budget(budget))
    service = LLMService.open(path, options=options, speculation=drafts)
    assert (service.engine.model.streamed is not None) == (how == "streamed")
    adapters = Adapters(service.engine.model, ServerOptions(adapter=given))
    executor = make_executor(service, adapters=adapters, on_dispatch=dispatches.append)
    executor.start()
    try:
        if how == "drafts":
            # Opening rehearsed it.
            counts = service.engine.speculation.counts
            before = dataclasses.replace(counts)
            (events,) = together(executor, asked)
            accepted = counts.accepted - before.accepted
            verified = [each for each in dispatches if each.kind == "verify"]
            assert 0 < accepted < 20
            assert len(verified) == counts.verifications - before.verifications
            # Of each verification all tokens but the last were drafted.
            assert sum(each.tokens for each in verified) == accepted + len(verified)
            assert events[-1].drafted == accepted / 20
        names = ["", "formal", "terse", "", "terse", "formal"]
        calls = [dataclasses.replace(asked, adapter=name) for name in names]
        for name, events in zip(names, together(executor, *calls), strict=True):
            assert written(events)[1] == wanted[name], name
    finally:
        executor.stop(60)
        service.close()
