"""The project's exceptions. Messages say what is wrong, where, and what would be right; only the CLI turns them into exit codes."""


class EdgeVitError(Exception):
    """Wrong input or environment: one clear line for the user; the command line exits with `exit_code`."""

    exit_code = 2


class ParityError(EdgeVitError):
    """An exported artifact does not compute what its module computes (or the check would prove nothing)."""

    exit_code = 3
