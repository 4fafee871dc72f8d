"""Entry point of `python -m tokengrove`, which is the same as the command `tokengrove`."""

from tokengrove.commands import main

main()
