"""Encoders of export formats. Every format contains the same rows, session entries and cursor."""
