"""Measures models and writes bundles: `expert_widths` (on a text) and `seq2seq_widths` (on pairs), both by
`width_losses`; `prefill`; and `contexts`, by `context_errors`."""
