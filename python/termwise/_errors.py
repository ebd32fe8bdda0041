"""Exceptions. Each is also a subclass of the corresponding built-in exception."""

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
    """An invalid argument."""


class MissingFileError(Error, FileNotFoundError):
    """A file, folder or model that does not exist."""


class FileError(Error, OSError):
    """A file that cannot be read or written."""


class BusyError(Error, BlockingIOError):
    """A run that another process is computing."""


class OutOfMemoryError(Error, MemoryError):
    """The system has too little memory."""


class RunError(Error, RuntimeError):
    """A computation that failed."""
