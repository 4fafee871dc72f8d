"""The output of commands for people: rich tables and views of the API's answers. Nothing here does input.

Agents' texts are hostile: they become `Text`, never markup, and pass through `tokengrove.texts.printable` first.
"""
