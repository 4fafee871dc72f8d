"""Answers of an export -> samples. Whatever the format, the samples of one export are the same."""
