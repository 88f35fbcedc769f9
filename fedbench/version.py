"""The release number and the protocol number."""

__version__ = "0.1.0"

PROTOCOL = 1
"""Raised whenever the core changes a number on a board: results of two protocols are never mixed."""
