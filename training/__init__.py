"""Makes models: from texts to Hugging Face folders, adapters and bundles.

    settings, recipes/    settings of all runs, and the packaged recipes
    data/                 from files to the batch of a step
    loop/                 the loop that trains any job
    decoders, seq2seq/ elastic/          one module or package per kind of run
    calibration, contexts/ int8_prefill/ speculation/ experts/    one package per calibration

In a package `run.py` runs from sources to a result in a folder; the recipe and the job of a run are there, or
in `job.py`.
"""

import importlib.util

from jaxllm.errors import ConfigError

if missing := [name for name in ("optax", "orbax") if importlib.util.find_spec(name) is None]:
    raise ConfigError(f"training needs {' and '.join(missing)}; run `pip install 'jaxllm[train]'`")
