"""Entry point of `python -m proxy.commands`, which is the same as `tokengrove`."""

from proxy.commands import main

main()
