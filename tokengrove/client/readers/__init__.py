"""Readers, which convert the bytes or files of an export to samples. The samples are the same in every format."""
