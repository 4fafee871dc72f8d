"""The tables of options: each option is declared once, with its name, type, default, bounds and help.

The server's parsers, the flags of the command line, the client's typed dicts and the tables of the documents are made
from these declarations. A new option is one field here, and the code that obeys it.
"""
