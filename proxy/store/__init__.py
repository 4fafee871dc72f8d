"""Durable sessions: a turn is committed to the database before the end of its reply is sent."""
