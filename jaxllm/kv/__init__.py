"""Keys and values of past tokens."""
