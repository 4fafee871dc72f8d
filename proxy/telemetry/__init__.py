"""Logs, metrics and traces for the operator of the server. This package imports no other part of the server."""
