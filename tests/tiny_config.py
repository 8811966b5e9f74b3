"""The config of the tiny model (see `tests.tiny`), for tests where JAX is not installed, too."""

from jaxllm.config import ModelConfig, RopeConfig

WINDOW_TOKENS = 128
MERGES = (("h", "e"), ("l", "l"), ("Ġ", "t"), ("he", "ll"), ("Ġt", "he"))
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
# Ids: 256 bytes, the merges, then the special tokens.
BEGIN_ID = 256 + len(MERGES)
END_ID = BEGIN_ID + 1
VOCAB_SIZE = 256 + len(MERGES) + len(SPECIAL_TOKENS)

TINY = ModelConfig(
    model_type="llama", vocab_size=VOCAB_SIZE, hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16,
    ffn_size=80, window_tokens=WINDOW_TOKENS, rope=RopeConfig(dim=16),
)  # fmt: skip
