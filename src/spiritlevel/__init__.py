"""A spirit level for loss surfaces."""

__version__ = "0.1.0"
