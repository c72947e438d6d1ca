"""The project's exceptions: a message says what is wrong, where, and what would be right. Only the CLI exits."""


def first_line(error: BaseException) -> str:
    """What another library's exception says, as far as one line takes it; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class EdgeVitError(Exception):
    """Wrong input or environment: one clear line for the user; the command line exits with `exit_code`."""

    exit_code = 2


class ParityError(EdgeVitError):
    """An exported artifact does not compute what its module computes (or the check would prove nothing)."""

    exit_code = 3
