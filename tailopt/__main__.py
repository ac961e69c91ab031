"""The command ``tailopt``, and ``python -m tailopt``: quiet on Ctrl-C from the first import on."""

import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line."""
    try:
        from tailopt.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
