"""The commands that run the server or read its database. `tokengrove.commands` is the command line."""
