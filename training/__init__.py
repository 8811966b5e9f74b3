"""Making what the core consumes: tokenizers, models, and the recipes that made the packaged one."""
