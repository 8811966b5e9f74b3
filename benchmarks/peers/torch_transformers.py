"""Runs transformers on torch, on the same Hugging Face folder, in float32 or bfloat16.

It uses `inference_mode`, scaled-dot-product attention, logits of the last token alone, and both of its
caches: the one that grows and the one of a fixed length.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.peer import Opening, Progress

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
GROWING, FIXED = "dynamic cache", "static cache"


class TransformersSession:
    """One model in torch."""

    settings = (GROWING, FIXED)

    def __init__(self, opening: Opening, progress: Progress) -> None:
        del progress
        import torch
        import transformers

        torch.set_num_threads(opening.threads)
        transformers.logging.disable_progress_bar()
        self._torch, self._transformers = torch, transformers
        self._context_tokens = opening.context_tokens
        self._format = opening.format
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            opening.model,
            dtype=getattr(torch, DTYPES[opening.format]),
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
        ).eval()
        self._cache: Any = None
        self._fixed: Any = None
        self._token: Any = None
        self._seen = 0

    def facts(self) -> dict[str, Any]:
        """Sizes of the weights; a shared embedding counts once."""
        weights = list(self._model.parameters())
        weight_bytes = sum(each.numel() * each.element_size() for each in weights)
        embedding = self._model.get_input_embeddings().weight
        tied = self._model.get_output_embeddings().weight is embedding
        return {
            "weight_bytes": weight_bytes,
            "bits_per_weight": 8 * weight_bytes / sum(each.numel() for each in weights),
            "step_bytes": weight_bytes - (0 if tied else embedding.numel() * embedding.element_size()),
            "format": self._format,
        }

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        if setting == GROWING:
            self._cache = self._transformers.DynamicCache(config=self._model.config)
        elif self._fixed is None:
            self._cache = self._fixed = self._transformers.StaticCache(
                config=self._model.config, max_cache_len=self._context_tokens
            )
        else:
            self._cache = self._fixed
            with self._torch.inference_mode():
                self._fixed.reset()
        self._seen = 0
        self._token = self._feed(self._torch.tensor([list(prompt)]))
        return int(self._token)

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        ids = []
        for _ in range(tokens):
            self._token = self._feed(self._token)
            ids.append(int(self._token))
        return ids

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> Sequence[float]:
        """See `Session.score`."""
        torch = self._torch
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
            scores = torch.log_softmax(logits.double(), -1)
            return scores[torch.arange(len(targets)), torch.tensor(list(targets))].tolist()

    def _feed(self, ids: Any) -> Any:
        """Feeds ids `[1, T]`; the likeliest next one `[1, 1]`."""
        torch = self._torch
        with torch.inference_mode():
            positions = torch.arange(self._seen, self._seen + ids.shape[1])
            self._seen += ids.shape[1]
            out = self._model(
                ids,
                position_ids=positions[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            return out.logits[:, -1].argmax(-1, keepdim=True)
