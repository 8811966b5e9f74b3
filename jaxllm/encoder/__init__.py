"""Encoders: what one is (`config`), its parameters (`parameters`) and what it computes (`forward`)."""
