"""The one exception that tailopt raises for bad input, and how it is put into one line."""

MOST_CHARACTERS = 500
"""Of a line that echoes what a user or a file said."""


class InputError(ValueError):
    """Something given to tailopt is wrong: a file, an option, a policy, a plan.

    The message is one line that says what is wrong, where (file, row, column, request), and what was
    expected. The command line prints it and exits with code 2, without a traceback.

    >>> raise InputError("policy 'lptt': unknown; known: lpt, uniform")
    Traceback (most recent call last):
        ...
    tailopt.errors.InputError: policy 'lptt': unknown; known: lpt, uniform
    """


def one_line(text: str) -> str:
    """Text of any origin as one printable line: white space collapsed, the middle of a long one left out.

    Control characters and lone surrogates, which a terminal might obey or refuse, become ``\\ufffd``.

    >>> one_line("a\\n  b\\x1b[31m"), len(one_line("x" * 10_000))
    ('a b\ufffd[31m', 500)
    """
    most = MOST_CHARACTERS
    if len(text) > 4 * most:
        text = f"{text[: 2 * most]} ... {text[-2 * most :]}"
    line = "".join(one if one.isprintable() else "\ufffd" for one in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most // 2 - 5]} ... {line[-most // 2 :]}"


def shown(value: object) -> str:
    """A value in a message, its first 60 characters.

    >>> shown([1, 2]), shown([10**5000])
    ('[1, 2]', 'one with a number of thousands of digits')
    """
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "one with a number of thousands of digits"
