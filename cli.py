"""`python cli.py` from a checkout is `tokengrove`; the package installs the command itself."""

from proxy.commands import main

if __name__ == "__main__":
    main()
