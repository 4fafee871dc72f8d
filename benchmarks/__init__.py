"""A benchmark of rollout gateways: README.md explains it."""
