"""Widens the experts of a trained mixture without changing its answers.

The experts of the packaged mixture are read in a tenth of a millisecond, and routers of random weights are
like no trained ones. So each expert gets further neurons in pairs that read the same and write the opposite,
and so cancel: routers, and which experts a token visits, stay the trained ones, and experts have the size of
those of larger models.
"""

import dataclasses
from pathlib import Path

import numpy as np

from jaxllm.checkpoints.huggingface import read_config, read_params, write_folder
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer, write_tokenizer
from jaxllm.errors import ConfigError
from serving.host.progress import Progress

_VERSION = 1


def widened_folder(folder: Path, out: Path, times: int, progress: Progress | None = None) -> Path:
    """A Hugging Face folder of a mixture whose experts have `times` as many neurons, made unless it is there.

    Args:
      folder: of the trained mixture.
      out: where those of all sizes are kept.
      times: at least 2.
      progress: called with ("Widening experts", parameters done, parameters in all).

    Raises:
      ConfigError: the model has no experts, or an odd number of neurons would be added.
    """
    cfg = read_config(folder)
    added = (times - 1) * cfg.expert_ffn_size
    if times < 2 or not cfg.experts or added % 2:
        raise ConfigError(
            "experts are widened 2 times and more, by an even number of neurons; got "
            f"{times} times, {cfg.experts} experts, {added} neurons"
        )
    path = out / f"widened-v{_VERSION}-{times}"
    if (path / "config.json").exists():
        return path
    params: dict[str, np.ndarray] = {}
    for number, (name, value) in enumerate(read_params(folder, cfg)):
        whole = np.asarray(value, np.float32)
        params[name] = _wider(name, whole, added, number) if ".experts." in name else whole
        if progress is not None:
            progress("Widening experts", number + 1, 0)
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path, read_tokenizer(folder))
    # The config comes last and whole: where it is, the folder is.
    neurons = times * cfg.expert_ffn_size
    # Of a model without dense layers some checkpoints know one number alone.
    dense = cfg.ffn_size if not all(cfg.is_sparse(layer) for layer in range(cfg.layers)) else neurons
    write_folder(path, dataclasses.replace(cfg, expert_ffn_size=neurons, ffn_size=dense), params)
    return path


def _wider(name: str, stack: np.ndarray, added: int, seed: int) -> np.ndarray:
    """A stack `[E, F, D]` with further neurons, of which each second one cancels the one before."""
    draw = np.random.default_rng((_VERSION, seed))
    experts, _, width = stack.shape
    new = np.zeros((experts, added, width), np.float32)
    new[:, ::2] = stack.std() * draw.standard_normal(new[:, ::2].shape, np.float32)
    new[:, 1::2] = new[:, ::2] * np.float32(-1 if name.endswith(".down") else 1)
    return np.concatenate([stack, new], axis=1)
