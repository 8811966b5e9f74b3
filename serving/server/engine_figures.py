"""Tells what an open model has read and holds, for metrics and the dashboard; callable from any thread."""

from serving.loading import LoadedModel
from serving.server.figures import Figures


def storage_figures(model: LoadedModel) -> Figures:
    """The experts that were visited, and the bytes that were read from storage since the start; empty where
    all weights are in memory."""
    streamed = model.streamed
    if streamed is None:
        return {}
    # Imported by now: the model is such a one.
    from serving.weights.experts.weights import ExpertWeights

    if not isinstance(streamed, ExpertWeights):
        return {"read_bytes": {"weights": streamed.counts.read_bytes}}
    counts = streamed.counts
    return {
        "experts": {"visits": counts.visits, "hits": counts.hits, "foreseen": counts.foreseen},
        "read_bytes": {"experts": counts.read_bytes},
    }


def weight_figures(model: LoadedModel) -> int:
    """Bytes of weights that are always in memory."""
    streamed = model.streamed
    return model.bundle.weight_bytes if streamed is None else streamed.staying_bytes
