"""Makes models elastic (ELMS, arXiv 2409.09071): `recipe`, `importance` of units, `job`, then `run`."""
