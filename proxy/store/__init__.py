"""Durable sessions: everything a finished reply promised is in the database before its end goes out."""
