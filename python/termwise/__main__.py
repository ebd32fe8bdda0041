"""The program ``termwise``, as ``python -m termwise``."""

import signal
import sys

from . import _core
from ._commands import AGAIN


def main() -> None:
    """Runs the program with the arguments of this process, and ends it."""
    # Python's handler only takes note of Ctrl-C, and this thread does not come back to look: commands that do not stop by themselves are ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_core.main(["termwise", *sys.argv[1:]], AGAIN))


if __name__ == "__main__":
    main()
