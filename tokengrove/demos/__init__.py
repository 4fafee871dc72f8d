"""The demos: agents and a trainer that use the server over HTTP only."""
