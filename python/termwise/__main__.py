"""The program ``termwise``, as ``python -m termwise``."""

import signal
import sys

from . import _core
from ._commands import RESPAWN_ARGV


def main() -> None:
    """Run the program with the arguments of this process, and exit."""
    # Python's handler would only record Ctrl-C, since the interpreter does not run during a command. The default action ends commands that do not handle it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_core.main(["termwise", *sys.argv[1:]], RESPAWN_ARGV))


if __name__ == "__main__":
    main()
