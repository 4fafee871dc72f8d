"""Entry point of `python cli.py` in a checkout, which is the same as the installed command `tokengrove`."""

from tokengrove.commands import main

if __name__ == "__main__":
    main()
