"""mBART: BART with layer norms before each block, and one after the last layer of each side."""

from jaxllm.models.architectures.bart import bart_like

MBART = bart_like("mbart", "MBartForConditionalGeneration", learned_positions=True, embed_norm=True)
