"""The project's exceptions: a message says what is wrong, where, and what would be right. Only the CLI exits."""


class EdgeVitError(Exception):
    """Wrong input or environment: one clear line for the user; the command line exits with `exit_code`."""

    exit_code = 2


class ParityError(EdgeVitError):
    """An exported artifact does not compute what its module computes (or the check would prove nothing)."""

    exit_code = 3
