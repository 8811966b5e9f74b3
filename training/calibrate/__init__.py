"""Measures models on a text and writes bundles: `expert_widths` (by `width_losses`) and `prefill`."""
