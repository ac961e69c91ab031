"""What goes wrong while a plan is carried out on real engines."""

from tailopt.errors import InputError


class ReplayError(InputError):
    """A replay cannot go on: an engine that fails again and again, or answers nonsense, or a full disk.

    One line, as any :class:`tailopt.errors.InputError`. What was recorded until then is kept and says so.
    """
