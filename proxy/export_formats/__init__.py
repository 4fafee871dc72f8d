"""Rows of an export -> bytes on the wire. Every format holds the same rows, entries of sessions and cursor."""
