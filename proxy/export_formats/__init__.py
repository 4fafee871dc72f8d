"""Encoders of export formats. Every format carries the same rows, session entries and cursor."""
