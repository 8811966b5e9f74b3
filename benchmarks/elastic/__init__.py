"""`jaxllm bench elastic`: what levels cost, what switching costs, and how right answers are in time.

The systems beside ours, under the names that ELMS (arXiv 2409.09071, section 5.1) has for them:

- PFS: plain models of several sizes, trained from nothing. All of them in memory, or (PFS-swap) one at a
  time, read from storage when another is wanted: a change is taken to be the reading of its file alone. Each
  reads a prompt by its own tokenizer; a bundle's weights are at its own width, which rows name, as they do
  how many models there are and of how many parameters: the size of our whole model is one of them only where
  it is asked for (`--pfs`, which takes the elastic bundle's whole model, too).
- LLM-Pruner: a model whose levels have no anchors and no shared order in memory; changing the level moves the
  level's weights.
- LE (no recovery): layer-wise elastification, which leaves out the least important layers. What remains is
  used as it is, without the recovery training that our levels have, which might make it better.
- LG2+CS (no sparsity): the prompt shortened by scores as in LLMLingua-2; in the place of contextual sparsity
  every time per token is taken as met, and nothing as lost: more than it reaches.
- jaxllm-model-only and jaxllm-prompt-only: ours without shortening prompts, and with the whole model alone.
- jaxllm-random and jaxllm-oracle: ours with decisions drawn at random among those in time, and with the best.

An objective of <100,100> asks for nothing: every system meets it. Beside all six objectives there are shares
of the five that ask for less than all of the time.

Systems that are compared are timed in alternation. Two shares are given of each: `accuracy`, of right
answers whether in time or not, and `right_and_held`, of those that met their objective besides. Intervals,
and comparisons with ours, draw questions anew, not requests (`resampling.py`).
"""
