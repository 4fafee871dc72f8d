"""Processes that serve: one server, or a supervisor with several workers."""
