"""`python -m edgevit` is `edgevit`."""

from edgevit.cli import main

main(prog_name="edgevit")
