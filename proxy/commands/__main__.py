"""`python -m proxy.commands` is `tokengrove`."""

from proxy.commands import main

main()
