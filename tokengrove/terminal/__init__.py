"""What commands print for people: tables and views of rich, made of what the API answers. Nothing here reads or asks.

Agents' texts are hostile: they become `Text`, never markup, and pass `tokengrove.tree_view.printable` before.
"""
