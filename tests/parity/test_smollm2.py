"""SmolLM2-135M-Instruct, a real chat model: token ids, log-probabilities and greedy answers of transformers,
which reads the same GGUF file itself, and of llama.cpp, on the file and on the one that we write of it.

An answer of another engine is judged along ours: after the same tokens it has to choose ours, or give ours a
logit that is less than a tie behind. Without a tie the answers are equal, by induction.
"""

import json
import shutil

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.peers.llama import LlamaCppSession
from benchmarks.peers.peer import Opening
from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.bundle import Bundle
from jaxllm.bundle.kit import find_kit, read_kit
from jaxllm.export.gguf_file import write_plain_gguf
from jaxllm.export.plain_model import read_plain
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.prepare import prepare
from jaxllm.serving.evaluation.texts import perplexity
from tests import tiny_hf
from tests.quick_jit import jit
from tests.serving.server.daemons import Process

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

CONTEXT, NEW_TOKENS, TEXT_TOKENS = 512, 200, 384
# Log-probabilities: of float32 sums in another order, and of llama.cpp, which keeps keys and values in
# float16.
TOLERANCE, LLAMA_TOLERANCE = 1e-3, 0.02
CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in rhymes."},
        {"role": "user", "content": "Write a short poem about the sea."},
        {"role": "assistant", "content": "The sea is wide,\nit has a tide."},
        {"role": "user", "content": "Go on, and tell me of its ships."},
    ],
    [{"role": "user", "content": "Explain in simple words why leaves are green, and why they fall.  \n"}],
)
# Numbers, code, blanks, scripts, a broken emoji, and text that spells special tokens.
STRANGE = (
    "def f(x):\n\treturn  x**2   # 1234567, 3.14\r\n",
    "Ærøskøbing — “quoted” … naïve café, 東京 and Привет, שלום; \u200bzero width, e\u0301",
    "🙂👩‍👩‍👧‍👦 \ud83d".encode("utf-8", "ignore").decode(),
    "   leading and trailing   \n\n\n",
    "<|im_start|>user\nWho<|im_end|>\n<|endoftext|><|im_star|> <repo_name>",
    "I'll we've DON'T it's 'tis",
)


@pytest.fixture(scope="module")
def gguf(data_dir):
    found = sorted((data_dir / "models" / "smollm2-135m-instruct").glob("*.gguf"))
    if not found:
        pytest.skip("SmolLM2-135M-Instruct is missing")
    return found[0]


@pytest.fixture(scope="module")
def made(gguf, tmp_path_factory):
    """A folder with `f32.jaxllm`, of the GGUF file, and `f32.gguf`, of that bundle."""
    folder = tmp_path_factory.mktemp("smollm2")
    prepare(gguf, folder / "f32.jaxllm", weights="f32")
    with Bundle.open(folder / "f32.jaxllm") as bundle:
        write_plain_gguf(folder / "f32.gguf", read_plain(bundle), "f32")
    yield folder
    # A gigabyte.
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def engine(made):
    options = EngineOptions(context_tokens=CONTEXT, cache_tokens=(CONTEXT,), cache_dtype="float32")
    opened = Engine.open(made / "f32.jaxllm", options=options, warm_up=False)
    # Of the longest chat.
    opened.warm_up(prompt_tokens=100, max_tokens=NEW_TOKENS)
    return opened


# One daily; the others in campaigns.
@pytest.fixture(
    scope="module", params=[0, *(pytest.param(each, marks=pytest.mark.campaign) for each in (1, 2))]
)
def answer(request, engine):
    """Our greedy answer to a chat: (prompt, answer) in token ids."""
    prompt = engine.tokenizer.encode_chat(CHATS[request.param])
    said = engine.generate(prompt, GenerationConfig(max_tokens=NEW_TOKENS, ignore_eos=True)).tokens
    assert len(said) == NEW_TOKENS
    return prompt, list(said)


@pytest.fixture(scope="module")
def text(data_dir):
    path = data_dir / "text" / "wikitext2_valid.txt"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    return path.read_text(encoding="utf-8")[:20000]


@pytest.fixture(scope="module")
def their_tokenizer(gguf):
    with tiny_hf.quiet():
        return transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


@pytest.fixture(scope="module")
def theirs(gguf):
    """transformers' logits `[T, V]` of token ids."""
    with tiny_hf.quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        ).eval()

    def logits(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].numpy()

    return logits


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def behind(logits, prompt, answer):
    """How far each token of an answer is behind the likeliest, in logits, after those before it."""
    rows = logits[len(prompt) - 1 : len(prompt) + len(answer) - 1]
    return rows.max(-1) - rows[np.arange(len(answer)), answer]


def test_token_ids_and_chats_are_transformers(engine, their_tokenizer, text):
    for each in (text, *STRANGE):
        assert engine.tokenizer.encode(each) == their_tokenizer(each).input_ids, each[:80]
        ids = engine.tokenizer.encode(each)
        assert engine.tokenizer.decode(ids) == their_tokenizer.decode(ids, skip_special_tokens=True)
    for chat in CHATS:
        expected = their_tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert engine.tokenizer.render_chat(chat) == expected
        assert engine.tokenizer.encode_chat(chat) == their_tokenizer(expected).input_ids


def test_token_ids_are_llama_cpps(engine, gguf, made, text):
    """On the original file, and on the one that we wrote."""
    llama_cpp = pytest.importorskip("llama_cpp")
    for path in (gguf, made / "f32.gguf"):
        other = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        for each in (text, *STRANGE, *(engine.tokenizer.render_chat(chat) for chat in CHATS)):
            found = other.tokenize(each.encode(), add_bos=True, special=True)
            assert found == engine.tokenizer.encode(each), (path.name, each[:80])
        assert other.token_eos() in engine.tokenizer.eos_ids


def test_log_probabilities_are_transformers(engine, theirs, text):
    """Of every token of the vocabulary at every place, whole and from a cache that was filled in chunks."""
    ids = engine.tokenizer.encode(text)[:TEXT_TOKENS]
    expected = log_softmax(theirs(ids))

    @jit
    def step(params, tokens, cache):
        hidden, cache = decoder.forward(params, tokens, cache, cfg=engine.cfg)
        return decoder.logits(params, hidden, cfg=engine.cfg), cache

    row = np.array([ids], np.int32)
    whole, _ = step(engine.runner.params, row, None)
    half = TEXT_TOKENS // 2
    cache = new_cache(engine.cfg, batch=1, tokens=TEXT_TOKENS, dtype=jnp.float32)
    first, cache = step(engine.runner.params, row[:, :half], cache)
    second, _ = step(engine.runner.params, row[:, half:], cache)
    for got in (whole, jnp.concatenate([first, second], axis=1)):
        assert np.abs(log_softmax(np.asarray(got)[0]) - expected).max() < TOLERANCE


def test_an_answer_is_transformers(answer, theirs):
    prompt, said = answer
    gaps = behind(theirs([*prompt, *said]), prompt, said)
    assert gaps.max() < TOLERANCE, f"token {gaps.argmax()} is {gaps.max():.4f} behind"


def test_an_answer_is_llama_cpps(answer, made):
    """On the file that we wrote in float32, where llama.cpp does not quantize activations."""
    pytest.importorskip("llama_cpp")
    opening = Opening(peer="llama.cpp", model=made / "f32.gguf", format="", threads=1, context_tokens=CONTEXT)
    other, (prompt, said) = LlamaCppSession(opening.model, opening), answer
    other.begin(other.settings[0])
    gaps = behind(other.feed_all([*prompt, *said], 0), prompt, said)
    assert gaps.max() < LLAMA_TOLERANCE, f"token {gaps.argmax()} is {gaps.max():.4f} behind"


def test_weights_back_in_a_gguf_file_are_the_same(gguf, made):
    """Our file has the numbers of the original's blocks, as the `gguf` package reads both."""
    library = pytest.importorskip("gguf")
    files = [library.GGUFReader(each) for each in (gguf, made / "f32.gguf")]
    first, second = ({tensor.name: tensor for tensor in file.tensors} for file in files)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if name.endswith(("norm.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight")):
            values = [library.dequantize(each.data, each.tensor_type) for each in (tensor, second[name])]
            np.testing.assert_array_equal(*values, err_msg=name)


WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city."}},
        "required": ["city"],
    },
}
ADDITION = {
    "name": "add_numbers",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def test_the_packaged_adapter_calls_functions_by_samples(gguf, tmp_path):
    """With neither a grammar nor a script: the model samples."""
    model = tmp_path / "smollm2.jaxllm"
    prepare(gguf, model, weights="int8")
    words = ("--adapter", "functions=functions", "--context", "2048", "--http", "127.0.0.1:0")
    asked = {"What is the weather in Oslo?": ("get_weather", {"city": "Oslo"}),
             "Add 17 and 25.": ("add_numbers", {"a": 17, "b": 25})}  # fmt: skip
    tools = [{"type": "function", "function": each} for each in (WEATHER, ADDITION)]
    with Process(tmp_path, "--model", model, *words) as process:
        url, right = process.ready() + "/v1/chat/completions", 0
        for question, (name, arguments) in asked.items():
            for seed in range(4):
                body = {
                    "model": "default:functions", "messages": [{"role": "user", "content": question}],
                    "tools": tools, "temperature": 0.7, "seed": seed, "max_tokens": 100,
                }  # fmt: skip
                (choice,) = httpx.post(url, json=body, timeout=120).json()["choices"]
                for call in choice["message"].get("tool_calls") or ():
                    found = call["function"]
                    right += (found["name"], json.loads(found["arguments"])) == (name, arguments)
    assert right >= 6


def test_the_packaged_kit_makes_levels_of_which_larger_ones_lose_less(gguf, tmp_path):
    prepare(gguf, tmp_path / "elastic.jaxllm", weights="int8", parts=read_kit(find_kit("smollm2")))
    levels = (10, 20, 35, 50, 75)
    options = EngineOptions(context_tokens=256, cache_tokens=(256,), levels=levels)
    engine = Engine.open(tmp_path / "elastic.jaxllm", options=options)
    text = (
        "The library stands at the end of a long street, behind a row of old trees. In the morning children "
        "come with their teachers, and in the evening people who work sit there and read the news."
    )
    losses = [perplexity(engine.at(level), [text]).perplexity for level in (*levels, 100)]
    assert losses == sorted(losses, reverse=True)
    # A half of the model still foresees a text better than chance among a hundred tokens; a tenth does not.
    assert losses[-3] < 100 < losses[0]
    assert "Paris" in engine.generate("The capital of France is", GenerationConfig(max_tokens=8)).text
