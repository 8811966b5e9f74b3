"""The version of this package, on the ground: whoever writes it into a file need not import the front
door."""

__version__ = "0.1.0"
