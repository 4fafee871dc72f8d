"""Entry point of `python -m tokengrove`, which is equivalent to the command `tokengrove`."""

from tokengrove.commands import main

main()
