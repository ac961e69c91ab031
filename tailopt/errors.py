"""The one exception that tailopt raises for bad input."""


class InputError(ValueError):
    """Something given to tailopt is wrong: a file, an option, a policy, a plan.

    The message is one line that says what is wrong, where (file, row, column, request), and what was
    expected. The command line prints it and exits with code 2, without a traceback.

    >>> raise InputError("policy 'lptt': unknown; known: lpt, uniform")
    Traceback (most recent call last):
        ...
    tailopt.errors.InputError: policy 'lptt': unknown; known: lpt, uniform
    """
