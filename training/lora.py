"""Low-rank adapters trained on a frozen model and saved in PEFT's layout (LoRA, arXiv 2106.09685).

The model's weights may have any width; over 8 or 4 bits this is QLoRA (arXiv 2305.14314) without its paging.

A run's folder holds `recipe.json`, `tokens/`, `checkpoints/`, `metrics.jsonl`, and at the end `adapter/` and
`summary.json`. The frozen weights are read from the model's folder or bundle and never written.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.checkpoints import huggingface, peft_folder
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.lora import LoraConfig, adapt, adapted_parameters, init_adapter
from jaxllm.models.parameters import Params
from jaxllm.prepare import prepare
from jaxllm.tokenizer import Tokenizer
from training.corpus import Corpus
from training.digests import model_digest
from training.encoders import ModelEncoder
from training.fitting import fit
from training.loop import Job, Trainer
from training.losses import next_token_logits, next_token_losses
from training.packing import Batch, Splits
from training.parallel import MeshShape, gathered, make_mesh
from training.recipe import PACKAGED, Source, check_keys, load, read_sources
from training.run_files import claimed, write_json
from training.settings import TrainSettings, require_float

_RECIPES = PACKAGED / "lora"
RecipeKind = TypeVar("RecipeKind", bound=TrainSettings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRecipe(TrainSettings):
    """One run of low-rank adaptation.

    Attributes:
      lora: rank, alpha and targets.
      sources: what it is trained on.
      held_out_share: of the documents, kept out of training to pick the best checkpoint.
    """

    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    sources: tuple[Source, ...]
    held_out_share: float = 0.02
    # There is little to fit, and it starts at nothing.
    weight_decay: float = 0.0
    warmup_steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        require_float("held_out_share", self.held_out_share, above=0, below=1)
        if not self.sources:
            raise ConfigError("an adapter needs something to learn: give at least one source")

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read what `to_json` wrote, or a parsed TOML file.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of its domain.
        """
        check_keys(cls, data)
        table = data.get("lora", {})
        try:
            lora = LoraConfig(**{**table, "targets": tuple(table.get("targets", LoraConfig.targets))})
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"malformed lora: {error}") from error
        return cls(**{**data, "lora": lora, "sources": read_sources(data["sources"])})


def lora_recipe_names() -> list[str]:
    """The recipes of adapters that come with the package."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml"))


def load_lora_recipe(name: str) -> LoraRecipe:
    """The adapter's recipe called `name`, or the one in the TOML file at path `name`.

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    return load(name, LoraRecipe.from_json, _RECIPES, lora_recipe_names())


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    """A model that is not trained: its config, weights in whatever form, and tokenizer."""

    cfg: ModelConfig
    params: Params
    tokenizer: Tokenizer
    name: str

    @classmethod
    def read(cls, model: Path, weights: WeightFormat | None = None) -> "FrozenModel":
        """Reads a bundle, or a Hugging Face folder at the width `weights` (float32 by default).

        Raises:
          CheckpointError: there is no such model.
          ConfigError: a bundle is asked for another width than its own.
        """
        model = Path(model)
        if model.is_dir():
            if weights in (None, "f32"):
                cfg = huggingface.read_config(model)
                params = {
                    name: jnp.asarray(value, jnp.float32)
                    for name, value in huggingface.read_params(model, cfg)
                }
                return cls(cfg, params, Tokenizer(read_tokenizer(model)), model.resolve().name)
            with tempfile.TemporaryDirectory() as folder:
                prepare(model, Path(folder) / "base.jaxllm", weights=weights, name=model.resolve().name)
                return cls._of_bundle(Path(folder) / "base.jaxllm")
        return cls._of_bundle(model, weights)

    def fingerprint(self) -> str:
        """Names the model: its config and all of its weights."""
        return model_digest(self.cfg, self.params)

    @classmethod
    def _of_bundle(cls, path: Path, weights: WeightFormat | None = None) -> "FrozenModel":
        bundle = Bundle.open(path)
        own = bundle.layout.weights
        if weights not in (None, own):
            raise ConfigError(
                f"{path} has {own} weights; to train over {weights} give its Hugging Face folder"
            )
        # Copied, because the file may go before its mapping does.
        params = jax.tree.map(lambda part: jnp.array(part, copy=True), bundle.load())
        return cls(bundle.cfg, params, Tokenizer(bundle.tokenizer_files()), bundle.layout.name)


def lora_job(cfg: ModelConfig, params: Params, recipe: LoraRecipe) -> Job:
    """What the loop trains: the adapter, with the model frozen."""
    dtype, scaling = jnp.dtype(recipe.precision), recipe.lora.scaling
    adapted_parameters(cfg, recipe.lora.targets)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return init_adapter(cfg, recipe.lora, key)

    def losses(adapter: dict[str, jax.Array], frozen: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        params = adapt(frozen, adapter, scaling)
        logits, _ = next_token_logits(params, batch, cfg=cfg, dtype=dtype, remat=recipe.remat)
        return next_token_losses(logits, batch), jnp.zeros(())

    return Job(init, losses, dict(params))


def train_lora(
    recipe: LoraRecipe,
    model: Path,
    run_dir: Path,
    *,
    data: Path | None = None,
    weights: WeightFormat | None = None,
    mesh_shape: MeshShape | None = None,
    tensorboard: bool = False,
    console: Console | None = None,
) -> Path:
    """Trains an adapter, or goes on with the run in `run_dir`, and exports the best.

    Args:
      recipe: the run.
      model: a Hugging Face folder, or a bundle.
      run_dir: the run's folder, made if missing.
      data: the folder that the recipe's sources are in.
      weights: width of a folder's frozen matrices.
      mesh_shape: devices; all of them along `data` by default.
      tensorboard: also write TensorBoard's events.
      console: where progress goes; the terminal's error stream by default.

    Returns:
      The adapter's folder, `run_dir/adapter`.

    Raises:
      ConfigError: the sources or recipe are unusable, or `run_dir` belongs to another run.
      CheckpointError: the model cannot be read.
    """
    console, run_dir = console or Console(stderr=True), Path(run_dir)
    frozen = FrozenModel.read(model, weights)
    recipe = fitted_to_window(recipe, frozen.cfg, console)
    mesh = make_mesh(mesh_shape or MeshShape(), recipe.batch // recipe.accumulate)
    job = lora_job(frozen.cfg, frozen.params, recipe)
    corpus = Corpus.open(recipe.sources, data, recipe.held_out_share)
    encoder = ModelEncoder(frozen.tokenizer)
    identity = {"model": frozen.fingerprint(), "documents": corpus.digest()}
    with claimed(run_dir, recipe, **identity):
        splits = Splits.of(corpus, encoder, recipe, run_dir / "tokens")
    trainer = Trainer(job, recipe, mesh)
    training = splits.train.documents
    console.print(
        f"{_size(trainer):,} parameters of rank {recipe.lora.rank} on {frozen.name}; {len(training):,} "
        f"documents, {len(training.tokens):,} tokens; {recipe.steps:,} steps, "
        f"{splits.train.epochs_at(recipe.steps):.1f} epochs",
        soft_wrap=True,
    )
    fitted = fit_adapter(trainer, splits, run_dir, console, tensorboard=tensorboard)
    peft_folder.write_adapter(run_dir / "adapter", frozen.cfg, recipe.lora, fitted.adapter, base=str(model))
    summary = {
        "parameters": _size(trainer),
        "best_step": fitted.best_step,
        "held_out": {"without": fitted.without, "with": fitted.loss},
    }
    write_json(run_dir / "summary.json", summary)
    console.print_json(data=summary)
    return run_dir / "adapter"


@dataclasses.dataclass(frozen=True)
class FittedAdapter:
    """What training an adapter gave: the best one, its step, and losses held out with and without it."""

    adapter: dict[str, Any]
    best_step: int
    loss: float
    without: float


def fitted_to_window(recipe: RecipeKind, cfg: ModelConfig, console: Console) -> RecipeKind:
    """A recipe whose rows a model can read (see `TrainSettings.within`); what that changes is told."""
    fitted = recipe.within(cfg.window_tokens)
    if fitted is not recipe:
        console.print(
            f"the model's window is {fitted.row_tokens:,} tokens: a step has {fitted.batch} rows of as many, "
            f"instead of {recipe.batch} of {recipe.row_tokens:,}",
            soft_wrap=True,
        )
    return fitted


def fit_adapter(
    trainer: Trainer, splits: Splits, folder: Path, console: Console, *, tensorboard: bool = False
) -> FittedAdapter:
    """Trains an adapter, or goes on with the checkpoints in `folder`.

    Args:
      trainer: of a `lora_job`.
      splits: what it learns from.
      folder: of `checkpoints/` and `metrics.jsonl`, made if missing.
      console: where progress goes.
      tensorboard: also write TensorBoard's events.
    """
    # Before the first step an adapter changes nothing: what the model alone loses.
    without, _ = trainer.evaluate(trainer.initial().params, splits.held_out_batches())
    best = fit(
        trainer, splits.train.batch_at, splits.held_out_batches, folder, console, splits.source_names,
        tensorboard=tensorboard,
    )  # fmt: skip
    return FittedAdapter(gathered(best.params), best.step, best.loss, without)


def _size(trainer: Trainer) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(trainer.abstract().params))
