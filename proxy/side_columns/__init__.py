"""Side columns: rows beside the tokens of a turn, of which every token has at most one."""
