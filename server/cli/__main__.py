"""`python -m servax.server.cli` is the `servax` command."""

from .app import main

main()
