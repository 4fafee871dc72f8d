"""What commands print for people: tables and views of rich, made of what the API answers. Nothing here reads or asks.

Agents' texts are hostile: they become `Text`, never markup, and pass `proxy.tree_view.printable` before.
"""
