"""`jaxllm generate`: the model it chooses, what it answers, and where it writes it."""

import dataclasses
from pathlib import Path

import pytest

from jaxllm.cli.model_choice import ModelChoice, speculation
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.text.tokenizer import Tokenizer
from tests import tiny_encdec
from tests.cli.outcome import CFG, PARAMS, WINDOW, Run, answer, failed, succeeded
from tests.tiny import tiny_tokenizer, write_tiny_bundle


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
    prompt = Tokenizer(tiny_tokenizer()).encode("hello the")
    expected = {"finish_reason": "length", "stop_string": None, "reused_tokens": 0, "completion_tokens": 10}
    assert {key: got[key] for key in expected} == expected
    assert got["prompt_tokens"] == len(prompt)
    assert got["text"]
    assert got["ttft_ms"] > 0
    assert got["tpot_ms"] > 0
    assert got["decode_tokens_per_s"] == pytest.approx(1000 / got["tpot_ms"], rel=0.05)
    one = answer(run(*asked, "-n", 1, "--json"))
    assert (one["completion_tokens"], one["tpot_ms"], one["decode_tokens_per_s"]) == (1, 0.0, None)


def test_the_models_own_sampling_is_the_default(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "advised.jaxllm"
    advised = dataclasses.replace(tiny_tokenizer(), sampling={"temperature": 100.0})
    write_tiny_bundle(path, cfg=CFG, params=PARAMS, tokenizer=advised)
    base = ("generate", "-m", path, "-p", "hello", "-n", 8, "--ignore-eos", "--json", "--seed", 1)
    greedy, drawn = (answer(run(*base, *more))["text"] for more in (["--temperature", 0], ["-t", 100]))
    assert greedy != drawn
    assert answer(run(*base))["text"] == drawn
    assert answer(run(*base, "--no-model-sampling"))["text"] == greedy
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
    # The first of them is not the empty prompt of an unread pipe.
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


def test_seed(run: Run, bundle: Path) -> None:
    base = ("generate", "-m", bundle, "-p", "hello", "-n", 12, "--ignore-eos", "-t", 3, "--json")
    texts = [answer(run(*base, "--seed", seed))["text"] for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    free = answer(run(*base))
    assert answer(run(*base, "--seed", free["seed"]))["text"] == free["text"]
    assert answer(run(*base))["seed"] != free["seed"]


def test_a_folder_and_its_bundle_say_the_same(run: Run, home: Path, tmp_path: Path) -> None:
    base = ("generate", "-p", "hello", "-n", 6, "--json", "--seed", 0)
    direct = answer(run(*base, "-m", home / "folder"))["text"]
    made = tmp_path / "made.jaxllm"
    out = succeeded(run("prepare", home / "folder", "-o", made))
    assert out.startswith(f"{made}: folder, f32 weights, 0.4 MB")
    assert answer(run(*base, "-m", made))["text"] == direct
    assert answer(run(*base, "-m", home / "tiny.jaxllm"))["text"] == direct


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
