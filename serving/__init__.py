"""The host side: opens models, keeps compiled buckets, plans and answers requests.

`jaxllm` names what of it is public.
"""

import jaxllm

if jaxllm.__file__ is None:
    # Its modules might still be found, by another way, and then not know where their models are.
    raise ImportError(
        f"{next(iter(jaxllm.__path__))} is found under the name jaxllm, and is no package: a clone of the "
        "project, say; rename that folder, move the script, or install jaxllm again (pip install -e)"
    )
