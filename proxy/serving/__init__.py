"""Server processes: a single server, or a supervisor with several workers."""
