"""`jaxllm generate`: the model it chooses, what it answers, with images and by exported programs, too."""

import dataclasses
from pathlib import Path

import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig, Sampling
from jaxllm.cli.model_choice import ModelChoice, speculation
from jaxllm.errors import ConfigError
from jaxllm.models.encoder.image_input import IMAGE
from jaxllm.prepare import prepare
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.text.tokenizer import Tokenizer
from tests import tiny_encdec
from tests.cli.outcome import CFG, PARAMS, WINDOW, Run, answer, failed, succeeded
from tests.cli.test_chat import expected_answers, turns
from tests.tiny import tiny_tokenizer, write_tiny_bundle
from tests.tiny_images import image_id, picture, save_smolvlm

GREEDY = GenerationConfig(max_tokens=4, ignore_eos=True, sampling=Sampling(temperature=0))
SHORT = ("-n", 4, "--ignore-eos", "--temperature", 0, "--draft", "none")


def test_generate_json(run: Run, bundle: Path) -> None:
    asked = ("generate", "-m", bundle, "-p", "hello the", "-n", 10, "--ignore-eos")
    got = answer(run(*asked, "--json"))
    # The text and nothing else.
    assert succeeded(run(*asked)) == got["text"] + "\n"
    assert list(got) == [
        "text", "finish_reason", "stop_string", "prompt_tokens", "reused_tokens", "completion_tokens",
        "seed", "ttft_ms", "tpot_ms", "decode_tokens_per_s", "first_token_ms", "prefill",
        "loaded_buckets", "compiled_buckets",
    ]  # fmt: skip
    assert got["prefill"] == "float"
    # Of this process, which began long before the request.
    assert got["first_token_ms"] is None or got["first_token_ms"] > got["ttft_ms"]
    assert got["loaded_buckets"] + got["compiled_buckets"] == 4
    expected = {"finish_reason": "length", "stop_string": None, "reused_tokens": 0, "completion_tokens": 10}
    assert {key: got[key] for key in expected} == expected
    assert got["prompt_tokens"] == len(Tokenizer(tiny_tokenizer()).encode("hello the"))
    assert got["text"]
    assert got["decode_tokens_per_s"] == pytest.approx(1000 / got["tpot_ms"], rel=0.05)


def test_the_models_own_sampling_is_the_default(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "advised.jaxllm"
    advised = dataclasses.replace(tiny_tokenizer(), sampling={"temperature": 100.0})
    write_tiny_bundle(path, cfg=CFG, params=PARAMS, tokenizer=advised)
    base = ("generate", "-m", path, "-p", "hello", "-n", 8, "--ignore-eos", "--json", "--seed", 1)
    greedy, drawn = (answer(run(*base, *more))["text"] for more in (["--temperature", 0], ["-t", 100]))
    assert greedy != drawn
    assert answer(run(*base))["text"] == drawn
    assert answer(run(*base, "--no-model-sampling"))["text"] == greedy
    # A new seed each time, which gives the answer again.
    free = answer(run(*base[:-2]))
    assert answer(run(*base[:-1], free["seed"]))["text"] == free["text"]
    assert answer(run(*base[:-2]))["seed"] != free["seed"]
    assert answer(run("info", path, "--json"))["sampling"] == {"temperature": 100.0}


def test_all_ways_to_give_a_prompt(run: Run, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("héllo 世", encoding="utf-8")
    base = ("generate", "-m", bundle, "-n", 5, "--json", "--seed", 0)
    ways = [
        run(*base, "-p", "héllo 世"),
        run(*base, stdin="héllo 世".encode()),
        run(*base, "--prompt-file", tmp_path / "prompt.txt"),
        run(*base, "--prompt-file", "-", stdin="héllo 世".encode()),
    ]
    texts = {(got["text"], got["prompt_tokens"]) for got in map(answer, ways)}
    assert len(texts) == 1
    # Not the empty prompt of an unread pipe.
    assert texts.pop()[1] == len(Tokenizer(tiny_tokenizer()).encode("héllo 世"))


def test_what_ends_an_answer(run: Run, bundle: Path) -> None:
    base = ("generate", "-m", bundle, "-p", "hello", "-n", 20, "--json")
    text = answer(run(*base, "--ignore-eos"))["text"]
    stop = text[4:6]
    assert len(stop) == 2
    got = answer(run(*base, "--ignore-eos", "--stop", "not in the text", "--stop", stop))
    assert (got["finish_reason"], got["stop_string"]) == ("stop", stop)
    assert got["text"] == text[: text.index(stop)]
    assert got["completion_tokens"] < 20
    # The end token, made certain by a bias; the text has no trace of it.
    (end,) = tiny_tokenizer().eos_ids
    biased = (*base, "-n", 6, "--logit-bias", f"{end}=100")
    got = answer(run(*biased))
    assert (got["text"], got["finish_reason"], got["completion_tokens"]) == ("", "stop", 1)
    got = answer(run(*biased, "--ignore-eos"))
    assert (got["text"], got["finish_reason"], got["completion_tokens"]) == ("", "length", 6)
    (letter,) = Tokenizer(tiny_tokenizer()).encode("Z", add_special_tokens=False)
    assert answer(run(*base, "-n", 7, "--logit-bias", f"{letter}=1e3"))["text"] == "ZZZZZZZ"
    # The window; the last token is never fed, so it needs no room.
    got = answer(run(*base, "-p", "x" * (WINDOW - 5), "-n", 100, "--ignore-eos"))
    assert got["prompt_tokens"] == WINDOW - 4
    assert (got["completion_tokens"], got["finish_reason"]) == (5, "length")


def test_a_task_of_an_encoder_decoder(run: Run, bundle: Path, tmp_path: Path) -> None:
    path = tiny_encdec.write_bundle(tmp_path / "t5.jaxllm", prefix="the ", tasks={"greeting": "hello "})

    def text(*options: str) -> str:
        return succeeded(run("generate", "-m", path, "-n", 8, "--ignore-eos", *options))

    greeted = text("-p", "hello 12")
    assert text("-p", "12", "--task", "greeting") == greeted
    # The model's own task, where none is named.
    assert text("-p", "12") != greeted
    assert answer(run("info", path, "--json"))["tasks"] == {"greeting": "hello "}
    failed(
        run("generate", "-m", path, "-p", "12", "--task", "farewell"),
        "no task 'farewell': there are greeting",
    )
    failed(run("generate", "-m", bundle, "-p", "12", "--task", "greeting"), "its folder names none")


def test_drafts_by_name():
    assert speculation("none") is None
    assert speculation("ngram") == SpeculationOptions(drafter="ngram")
    assert speculation("nested") == SpeculationOptions(drafter="nested")
    assert speculation("nested:50") == SpeculationOptions(drafter="nested", level=50)
    assert speculation("level:30%") == SpeculationOptions(drafter="level", level=30)
    assert speculation("draft") == SpeculationOptions(model="draft")
    # Without a name a model drafts by itself; commands that answer nothing have no drafts.
    assert speculation(None) == speculation("") == SpeculationOptions.by_itself()
    assert speculation(ModelChoice().draft) is None
    with pytest.raises(ConfigError, match="takes a percentage"):
        speculation("nested:half")


# Images


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle of a tiny SmolVLM, `m.jaxllm`, and two images."""
    pytest.importorskip("torch")
    home = tmp_path_factory.mktemp("smolvlm")
    prepare(save_smolvlm(home / "m"), home / "m.jaxllm")
    for seed in (0, 1):
        (home / f"{seed}.png").write_bytes(picture((28, 28), seed))
    return home


@pytest.fixture(scope="module")
def image_engine(smolvlm: Path) -> Engine:
    return Engine.open(smolvlm / "m.jaxllm", options=EngineOptions(prompt_embeddings=True), warm_up=False)


def test_generate_continues_after_images(run: Run, smolvlm: Path, image_engine: Engine) -> None:
    ask = ("generate", "-m", smolvlm / "m.jaxllm", *SHORT, "--json")
    first = ("--image", smolvlm / "0.png")
    got = answer(run(*ask, *first, "-p", "hello"))
    files = [(smolvlm / f"{seed}.png").read_bytes() for seed in (0, 1)]
    ids, rows = image_engine.image_rows(image_engine.tokenizer.encode(f"{IMAGE}hello"), files[:1])
    assert rows is not None
    assert len(rows.at) == ids.count(image_id()) > 0
    generation = image_engine.stream(ids, GREEDY, rows=rows)
    image_engine.warm_up(prompt_tokens=generation.prompt_tokens, max_tokens=4)
    assert got["text"] == generation.result().text
    assert got["prompt_tokens"] == len(ids)
    # In the order of their places, which a prompt may name.
    both = answer(run(*ask, *first, "--image", smolvlm / "1.png", "-p", f"a {IMAGE} b {IMAGE}"))
    ids, _ = image_engine.image_rows(image_engine.tokenizer.encode(f"a {IMAGE} b {IMAGE}"), files)
    assert both["prompt_tokens"] == len(ids)


def test_images_that_cannot_be_had(run: Run, smolvlm: Path, bundle: Path, tmp_path: Path) -> None:
    ask = ("generate", "-m", smolvlm / "m.jaxllm", "-p", "x", "--image")
    failed(run(*ask, tmp_path / "none.png"), "none.png: the image cannot be read", "check the path")
    (tmp_path / "text.png").write_text("no image")
    failed(run(*ask, tmp_path / "text.png"), "none of JPEG, PNG")
    failed(run(*ask, smolvlm / "0.png", "--image", smolvlm / "1.png", "-p", IMAGE), "2 images come with it")
    failed(run("generate", "-m", bundle, "-p", "x", "--image", smolvlm / "0.png"), "no encoder of images")
    program = run("generate", "--program", tmp_path, "-p", "x", "--image", smolvlm / "0.png")
    failed(program, "--image cannot be given with --program")


# Exported programs


@pytest.fixture(scope="module")
def program(home: Path) -> Path:
    """The bundle that chats, exported."""
    pytest.importorskip("flatbuffers")
    from click.testing import CliRunner

    from jaxllm.cli.main import cli

    out = home / "program"
    arguments = [str(home / "tiny.jaxllm"), "-o", str(out), "--platform", "cpu"]
    arguments += ["--chunk-tokens", "16", "--verify-tokens", "4"]
    done = CliRunner().invoke(cli, ["export", *arguments], catch_exceptions=False)
    assert done.output.startswith(f"{out}: 4 programs of tiny, ")
    return out


def test_generate_and_chat_answer_as_the_bundle_does(run: Run, bundle: Path, program: Path) -> None:
    asked = ("-p", "hello the", "-n", 10, "--ignore-eos")
    text = succeeded(run("generate", "-m", bundle, *asked))
    assert succeeded(run("generate", "--program", program, *asked)) == text
    got = answer(run("generate", "--program", program, *asked, "--json"))
    assert got["text"] + "\n" == text
    assert got["completion_tokens"] == 10
    assert "compiled_buckets" not in got
    assert "drafts" not in got
    # And alike with drafts.
    asked = ("--program", program, "-p", "hello the hello the", "-n", 10, "--ignore-eos")
    text = succeeded(run("generate", *asked))
    for draft in ("ngram", program):
        got = answer(run("generate", *asked, "--draft", draft, "--json"))
        assert got["text"] + "\n" == text
        assert got["drafts"]["verifications"] + got["drafts"]["plain_tokens"] > 0
    failed(run("generate", *asked, "--draft", "level:30"), "level 30 was not exported")
    got = run("chat", "--program", program, "-n", 4, "--ignore-eos", stdin=turns("hi", "hello"))
    assert got.code == 0
    assert got.out == expected_answers(bundle, ["hi", "hello"])
    assert got.err.startswith("tiny. ")


def test_what_was_exported_cannot_be_changed(run: Run, bundle: Path, program: Path, tmp_path: Path) -> None:
    for option in (("--model", bundle), ("--context", 32), ("--prefill", "float")):
        done = run("generate", "--program", program, "-p", "x", *option)
        failed(done, f"{option[0]} cannot be given with --program")
    failed(run("generate", "--program", tmp_path, "-p", "x"), "not a folder of programs", "jaxllm export")
    failed(run("generate", "--program", tmp_path / "none", "-p", "x"), "no such folder")


def test_what_cannot_be_exported(run: Run, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    failed(run("export", bundle, "-o", tmp_path), "exists already")
    failed(run("export", bundle, "-o", out, "--context", WINDOW + 1), f"window of {WINDOW}")
    failed(run("export", bundle, "-o", out, "--level", 30), "no levels")
    failed(run("export", tmp_path, "-o", out), "jaxllm prepare")
    for options in (
        ("--format", "tflite", "--precision", "w8a8"),
        ("--format", "tflite", "--platform", "cpu"),
        ("--precision", "int8"),
        ("--calibration-text", bundle),
    ):
        assert run("export", bundle, "-o", out, *options).code == 2
    assert not out.exists()
