"""Running agents. Speaks HTTP only: what works here works against a server anywhere."""
