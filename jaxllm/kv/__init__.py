"""Keys and values of past tokens: cache, chunks, codecs, bits by density, and the plan of a restore."""
