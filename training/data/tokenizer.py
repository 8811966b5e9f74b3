"""Trains byte-level BPE tokenizers for models that are trained from scratch.

Every byte is in the initial alphabet, so any text can be encoded and nothing maps to an unknown token;
digits are single tokens, so that a number's pieces mean the same everywhere. No token is added before or
after a text: packing marks the ends of documents.

The special tokens come first, with the same ids in every vocabulary: the ends of documents and turns, the
roles of a chat, and the marks that write a latency objective into a prompt (`jaxllm.elastic.slo`):
`<|ttft:40|>` requests a time to first token of 40 % of the whole model's.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxllm.elastic.slo import marks
from jaxllm.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, SYSTEM, USER, ASSISTANT, END_OF_TURN, *marks())

# How a chat is written with these tokens.
ROLE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The 256 bytes and the specials must fit before the first merge.
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns byte-level BPE merges; the same texts always give the same tokenizer.

    Args:
      texts: texts without special tokens.
      vocab_size: number of tokens, including the special ones (the first ids) and the 256 bytes.

    Returns:
      A tokenizer with exactly `vocab_size` tokens, for `tokenizer.json`.

    Raises:
      ConfigError: `vocab_size` is below `MIN_VOCAB_SIZE`, or the text is too small or too uniform to
        fill the vocabulary.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size must be at least {MIN_VOCAB_SIZE} (256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise ConfigError(
            f"the text has only enough distinct pieces for {size} tokens, the recipe asks for "
            f"{vocab_size}; give more text or lower vocab_size"
        )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token.

    Raises:
      ConfigError: the tokenizer has no such token.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ConfigError(f"the tokenizer has no {token} token; train it with `train_tokenizer`")
    return found
