"""Makes models of known shapes with random weights, to measure speed alone: the same on every machine.

Weights are drawn once, in bfloat16, into a Hugging Face folder in the user's cache directory; bundles and
peers' files are made from it as from any other. Their deviations keep activations of order one, so that no
denormal or infinite number changes the speed of a system.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import TokenizerFiles
from serving.host.progress import Progress
from serving.host.user_cache import cache_folder

# Deviation of a mixture's embeddings; what layers add is of order one.
_EMBEDDING_DEVIATION = 10.0
# Changes whenever the same name would draw other weights.
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Llama: D, L, N, K, H, F and V as everywhere here. With E experts of F neurons, of which each
    token visits `choices`, it is a Qwen3-MoE."""

    D: int
    L: int
    N: int
    K: int
    H: int
    F: int
    V: int = 32000
    E: int = 0
    choices: int = 0
    tied: bool = False
    window_tokens: int = 2048

    @property
    def cfg(self) -> ModelConfig:
        """As a model."""
        return ModelConfig(
            model_type="qwen3_moe" if self.E else "llama",
            qk_norm=bool(self.E),
            experts=self.E,
            experts_per_token=self.choices,
            expert_ffn_size=self.F if self.E else 0,
            vocab_size=self.V,
            hidden_size=self.D,
            layers=self.L,
            heads=self.N,
            kv_heads=self.K,
            head_dim=self.H,
            ffn_size=self.F,
            window_tokens=self.window_tokens,
            rope=RopeConfig(dim=self.H, theta=10000.0),
            tied_head=self.tied,
        )


SHAPES = {
    # The sizes of Karpathy's stories15M and stories110M.
    "15m": Shape(D=288, L=6, N=6, K=6, H=48, F=768, tied=True),
    "110m": Shape(D=768, L=12, N=12, K=12, H=64, F=2048, tied=True),
    # A small model for a phone: grouped queries, an ffn of 3 D, a head of its own: 258 M parameters.
    "250m": Shape(D=1024, L=16, N=16, K=4, H=64, F=3072),
    # The sizes of Qwen2.5 0.5B, whose embedding is the head, too, and has a quarter of the parameters.
    "0.5b": Shape(D=896, L=24, N=14, K=2, H=64, F=4864, V=151936, tied=True),
    # TinyLlama 1.1B.
    "1b": Shape(D=2048, L=22, N=32, K=4, H=64, F=5632),
    # A mixture of 1.2 billion parameters, of which a token uses 265 million.
    "moe-1b": Shape(D=1024, L=16, N=16, K=4, H=64, F=1408, E=16, choices=2),
}


def _encoder_decoder(*, D: int, L: int, N: int, F: int, V: int, gated: bool) -> ModelConfig:
    """Sizes of a T5: of both sides, with heads of 64 dimensions; the later ones are `gated`."""
    side = ModelConfig(
        model_type="mt5" if gated else "t5",
        vocab_size=V,
        hidden_size=D,
        layers=L,
        heads=N,
        kv_heads=N,
        head_dim=64,
        ffn_size=F,
        window_tokens=512,
        activation="gelu_tanh" if gated else "relu",
        gated_ffn=gated,
        norm_eps=1e-6,
        attention_scale=1.0,
        relative_buckets=32,
        relative_distance=128,
        tied_head=True,
    )
    scale = 1.0 if gated else D**-0.5
    return dataclasses.replace(side, encoder=side, tied_head=not gated, logit_scale=scale)


ENCODER_DECODERS = {
    # 223 million parameters, half of them in the decoder.
    "t5-base": _encoder_decoder(D=768, L=12, N=12, F=3072, V=32128, gated=False),
    # 1.2 billion, of which an embedding and a head of 250,112 words have 512 million.
    "mt5-large": _encoder_decoder(D=1024, L=24, N=16, F=2816, V=250112, gated=True),
}


def _switch(*, D: int, L: int, N: int, F: int, V: int, E: int, capacity: int) -> ModelConfig:
    """Sizes of Switch Transformers: E experts of F neurons in every other layer of both sides."""
    dense = _encoder_decoder(D=D, L=L, N=N, F=F, V=V, gated=False)
    side = dataclasses.replace(
        dense,
        encoder=None,
        model_type="switch_transformers",
        experts=E,
        experts_per_token=1,
        normalize_expert_weights=False,
        expert_ffn_size=F,
        expert_capacity=capacity,
        sparse_layers=(False, True) * (L // 2),
    )
    return dataclasses.replace(side, encoder=side)


SWITCHES = {
    # EdgeMoE's switch-base-64: 3.8 billion parameters, of which 3.6 billion are experts.
    "switch-base-64": _switch(D=768, L=12, N=12, F=3072, V=32128, E=64, capacity=64),
}
MIXTURES = tuple(name for name, shape in SHAPES.items() if shape.E)


def shape_folder(name: str, progress: Progress) -> Path:
    """The Hugging Face folder of a shape, drawn unless it is there.

    Args:
      name: of `SHAPES` or `ENCODER_DECODERS`.
      progress: called with ("Drawing weights", parameters drawn, parameters in all).

    Raises:
      ConfigError: there is no such shape.
    """
    cfgs = {name: shape.cfg for name, shape in SHAPES.items()} | ENCODER_DECODERS
    if name not in cfgs:
        raise ConfigError(f"there is no shape {name!r}; choose among {', '.join(cfgs)}")
    folder = cache_folder() / "benchmarks" / "shapes" / f"v{_VERSION}" / name
    if not (folder / "config.json").exists():
        write_random(folder, cfgs[name], progress)
    return folder


def write_random(
    folder: Path, cfg: ModelConfig, progress: Progress, tokenizer: TokenizerFiles | None = None
) -> None:
    """Writes a model of random weights and a tokenizer, of as many words if none is given, as a Hugging Face
    folder."""
    from jaxllm.checkpoints.huggingface import write_folder
    from jaxllm.checkpoints.tokenizer_folder import write_tokenizer

    params = dict(drawn_params(cfg, progress))
    write_tokenizer(folder, tokenizer or _word_tokenizer(cfg.vocab_size))
    if cfg.encoder is not None:
        (folder / "generation_config.json").write_text('{"decoder_start_token_id": 0}\n', encoding="utf-8")
    write_folder(folder, cfg, params)


def switch_bundle(name: str, progress: Progress) -> Path:
    """The bundle of one of `SWITCHES`, drawn unless it is there, a layer's experts in memory at a time. Every
    other expert has 2 bits, the others 4, for random weights cannot be calibrated; all else has 8.

    Args:
      name: of `SWITCHES`.
      progress: called with ("Drawing weights", parameters drawn, parameters in all).
    """
    path = cache_folder() / "benchmarks" / "shapes" / f"v{_VERSION}" / f"{name}.jaxllm"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_random_switch(path, SWITCHES[name], progress)
    return path


def write_random_switch(path: Path, cfg: ModelConfig, progress: Progress) -> None:
    """Writes a bundle of random weights of a mixture with an encoder; see `switch_bundle`."""
    from jaxllm.bundle import write_bundle
    from jaxllm.models.parameters import sparse_layers

    layers = len(sparse_layers(cfg))
    bits = np.where(np.arange(layers * cfg.experts) % 2, 2, 4).reshape(layers, cfg.experts)
    tokenizer = dataclasses.replace(_word_tokenizer(cfg.vocab_size), start_ids=(0,))
    params = drawn_params(cfg, progress)
    write_bundle(
        path, cfg=cfg, params=params, weights="int8", tokenizer=tokenizer, name=path.stem, expert_bits=bits
    )


def drawn_params(cfg: ModelConfig, progress: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """Draws a model's parameters in their order, in bfloat16; each name draws the same in any model of its
    place and size."""
    import ml_dtypes

    from jaxllm.models.parameters import param_specs

    specs = param_specs(cfg)
    for number, (name, spec) in enumerate(specs.items()):
        if spec.role == "vector" and not name.endswith(("router", "relative_positions")):
            value = np.ones(spec.shape, np.float32)
        else:
            inputs = np.prod(spec.shape[:-1]) if spec.role == "from_units" else spec.shape[-1]
            # A generator for each: the draw of one does not depend on the others' sizes.
            draw = np.random.default_rng((_VERSION, number))
            value = draw.standard_normal(spec.shape, np.float32) * np.float32(inputs**-0.5)
            if cfg.experts and name == "embed.tokens":
                # Embeddings outweigh what layers add, or all tokens visit the same experts.
                value *= np.float32(_EMBEDDING_DEVIATION * inputs**0.5)
        yield name, value.astype(ml_dtypes.bfloat16)
        progress("Drawing weights", number + 1, len(specs))


def _word_tokenizer(size: int) -> TokenizerFiles:
    """A tokenizer of `size` words: a model needs one, though its text is never read."""
    import tokenizers

    words = {f"w{i}": i for i in range(size)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    return TokenizerFiles(tokenizer_json=library.to_str())
