"""Claims a run's folder over a frozen model, and reads what the run learns from: documents, or pairs."""

from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from training.data.corpus import Corpus
from training.data.encoders import ModelEncoder
from training.data.packing import Splits
from training.loop.frozen_model import FrozenModel
from training.loop.parallel import own_rows
from training.loop.run_files import claimed, wait_for_first
from training.lora.recipe import LoraRecipe
from training.seq2seq.recipe import FAMILIES
from training.seq2seq.splits import PairSplits, read_splits


def require_trainable(cfg: ModelConfig, recipe: LoraRecipe, what: str) -> None:
    """Refuses an encoder-decoder that is not trained here, or a recipe that it cannot follow.

    Args:
      cfg: the model; a decoder alone is always trained.
      recipe: of the run.
      what: is trained, such as "adapters".

    Raises:
      ConfigError: it is refused.
    """
    if cfg.encoder is None:
        return
    if cfg.model_type not in FAMILIES:
        raise ConfigError(
            f"{what} of encoder-decoders are trained of {', '.join(FAMILIES)}, and this is {cfg.model_type}; "
            "take one of these"
        )
    if recipe.remat != "none":
        raise ConfigError(
            "layers of an encoder-decoder keep all activations: set remat to none in the recipe"
        )
    if recipe.loader != "packed":
        raise ConfigError(
            f"pairs are read by themselves, not by {recipe.loader}; leave loader out of the recipe"
        )
    if jax.process_count() > 1:
        raise ConfigError("encoder-decoders are trained by one process; start it without --coordinator")


def claimed_splits(
    run_dir: Path,
    recipe: LoraRecipe,
    frozen: FrozenModel,
    mesh: Mesh,
    data: Path | None,
    console: Console,
    *,
    shortened_share: float = 0.0,
    weights: str = "",
) -> Splits | PairSplits:
    """What a run trains on and holds out; the first process claims its folder.

    Args:
      run_dir: the run's folder, made if missing.
      recipe: of the run.
      frozen: the model; of an encoder-decoder the sources are of pairs.
      mesh: which divides the rows of pairs.
      data: the folder that the sources are in.
      console: where malformed lines are told.
      shortened_share: see `Corpus`.
      weights: what is made, if the run depends on it.

    Raises:
      ConfigError: a source is unusable, or the folder belongs to another run.
    """
    identity = {"model": frozen.fingerprint(), **({"weights": weights} if weights else {})}
    if frozen.cfg.encoder is not None:
        pairs = read_splits(
            recipe.sources,
            data,
            frozen.tokenizer,
            recipe,
            held_out_share=recipe.held_out_share,
            rows_multiple=recipe.accumulate * mesh.shape["data"] * mesh.shape["fsdp"],
        )
        with claimed(run_dir, recipe, **identity, documents=pairs.digest):
            pass
        return pairs
    corpus = Corpus.open(recipe.sources, data, recipe.held_out_share, shortened_share=shortened_share)
    corpus.tell(console)
    own = own_rows(mesh, recipe.batch, recipe.accumulate)
    with claimed(run_dir, recipe, **identity, documents=corpus.digest()):
        encoder, folder = ModelEncoder(frozen.tokenizer), run_dir / "tokens"
        splits = Splits.of(corpus, encoder, recipe, folder, loader=recipe.loader, own=own)
    wait_for_first("recipe")
    return splits
