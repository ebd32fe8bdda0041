"""Exceptions. Each is also the built-in exception that Python code expects."""

from __future__ import annotations


class Error(Exception):
    """Base class of the errors that termwise raises.

    >>> import termwise
    >>> try:
    ...     termwise.Variant("taylr=0..2")
    ... except termwise.Error as error:
    ...     print(type(error).__name__, isinstance(error, ValueError))
    InputError True
    """


class InputError(Error, ValueError):
    """An argument that cannot be used."""


class MissingFileError(Error, FileNotFoundError):
    """A file, folder or model that does not exist."""


class FileError(Error, OSError):
    """A file that cannot be read or written."""


class BusyError(Error, BlockingIOError):
    """A run that another process is working on."""


class OutOfMemoryError(Error, MemoryError):
    """Memory that the system does not have."""


class RunError(Error, RuntimeError):
    """Work that failed."""
