"""What the server tells its operator. Nothing here imports another part of the server."""
