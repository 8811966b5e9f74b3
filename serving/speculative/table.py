"""Decoding with drafts over compiled graphs (see `rounds`), which are filled before a request."""

from jaxllm.config import Bucket
from serving.buckets import BucketTable
from serving.progress import Progress
from serving.speculative.rounds import Rounds
from serving.streaming.table import StreamedTable


class SpeculativeTable(Rounds[BucketTable | StreamedTable]):
    """A target with a drafter (see `BucketTable`, whose calls these are)."""

    def fill(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """Compiles all that rounds take, the target's own graphs left aside; with `tokens` what a request of
        so many takes, the answer's among them."""
        buckets = [
            bucket for nodes in self._options.trees.nodes for bucket in self.target.tree_buckets(nodes)
        ]
        if tokens is not None:
            buckets = self.target.of_cache(buckets, self.target.cache_for(self.with_tree(tokens)))
        self.target.fill(buckets, progress)
        self._drafter.warm_up(progress, tokens=tokens)

    def request_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """The target's own graphs for one request (see `BucketPlan.request_buckets`)."""
        return self.target.request_buckets(prompt_tokens, self.with_tree(max_tokens))
