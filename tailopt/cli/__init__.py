"""The command line. Everything heavy is imported inside the commands, so that ``--help`` is quick."""

from tailopt.cli.application import app, main

__all__ = ["app", "main"]
