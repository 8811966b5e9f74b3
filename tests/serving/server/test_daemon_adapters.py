"""Adapters and objectives of the service as a process: given by its options, read again, and kept apart."""

import signal

import openai
import pytest

from jaxllm.checkpoints.peft import write_adapter
from jaxllm.client import Client
from jaxllm.models.lora import LoraConfig
from tests.models.test_lora import random_adapter
from tests.serving.server.daemons import Process
from tests.tiny import END_ID, TINY, write_tiny_bundle

CONFIG = """
context_tokens = 128
batch_rows = [2]
memory = "8GB"
adapters = "adapters"

[adapter]
formal = "adapters/formal"

[objectives]
{} = "<40,70>"
"""


@pytest.mark.slow
def test_adapters_and_objectives_by_options(tmp_path):
    for seed, name in enumerate(("formal", "terse", "late")):
        lora = LoraConfig(rank=2, alpha=16)
        write_adapter(tmp_path / "adapters" / name, TINY, lora, random_adapter(TINY, lora, seed))
    model, config = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8"), tmp_path / "service.toml"
    config.write_text(CONFIG.format("other"))
    (tmp_path / "keys").mkdir()
    service = Process(
        tmp_path / "keys", "--model", model, "--config", config, "--http", "127.0.0.1:0",
        "--socket", tmp_path / "s", "--contexts", tmp_path / "contexts",
        # Before those of the file.
        "--adapter", f"terse={tmp_path / 'adapters/terse'}",
    )  # fmt: skip
    try:
        with Client(socket=tmp_path / "s") as client:
            service.until(lambda: "ready:" in service.text())
            assert [each["id"] for each in client.http.get("/v1/adapters").json()["data"]] == ["terse"]
            url = service.text().split("listening on http://")[1].split('"')[0].split()[0]
            ours = openai.OpenAI(base_url=f"http://{url}/v1", api_key="none", max_retries=0)
            bias = {str(END_ID): -100}

            def asked(name):
                answer = ours.completions.create(
                    model=name, prompt="the quick brown fox", max_tokens=24, temperature=0, logit_bias=bias
                )
                return answer.choices[0].text

            # Who is on the loopback operates, as long as there are no keys.
            ours.post("/adapters", body={"name": "late"}, cast_to=object)
            texts = [asked(name) for name in ("tiny", "tiny:terse", "tiny:late", "tiny")]
            assert len(set(texts)) == 3
            assert texts[0] == texts[3]
            with pytest.raises(openai.NotFoundError, match="no adapter"):
                asked("tiny:formal")
            ours.delete("/adapters/late", cast_to=object)
            context = client.new_context(adapter="terse")
            first = context.generate("hello there", max_tokens=8).result()
            assert first.facts["adapter"] == "terse"
            # Objectives are the app's, by the options and by itself.
            assert client.http.get("/v1/objective").json()["slo"] is None
            app = f"uid-{tmp_path.stat().st_uid}"
            config.write_text(CONFIG.format(app))
            service.signal(signal.SIGHUP)
            service.until(lambda: client.http.get("/v1/objective").json()["slo"] == "<40,70>")
            told = client.call("hello", max_tokens=2).result().facts
            assert (told["slo"], told["slo_from"]) == ("<40,70>", "app")
            client.bind({"total_ms": 1e6})
            assert client.call("hello", max_tokens=2).result().facts["slo"] == {"total_ms": 1e6}
            service.signal(signal.SIGTERM)
            assert service.ended() == 0, service.text()
    finally:
        service.kill()
