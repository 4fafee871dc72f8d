"""Readers: bytes or files of an export -> samples. The samples are the same in every format."""
