"""Encoders such as MobileBERT: configuration (`config`), parameters (`parameters`), forward pass
(`forward`); and of images: SmolVLM's (`siglip`)."""
