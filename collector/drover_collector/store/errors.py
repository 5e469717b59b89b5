"""Errors of the store.

Exception
└── StoreError   one line: what is wrong and what to do
"""

from __future__ import annotations


class StoreError(Exception):
    """The store cannot be opened, read or written. The message is one line for the operator."""
