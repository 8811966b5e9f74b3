"""Makes models: from texts to Hugging Face folders, adapters and bundles.

    settings, recipes/    what a run is told
    data/                 from files to the batch of a step
    loop/                 the loop that trains any job
    pretrain/ seq2seq/ lora/ tiny_lm/ elastic/ calibrate/    one room per kind of run
    accelerator/          checks and measurements on one GPU or TPU
    commands/             the subcommands of `jaxllm`

In a room `recipe.py` describes a run, `job.py` defines what the loop trains, and `run.py` takes a run from
its sources to its result in a folder of its own.
"""
