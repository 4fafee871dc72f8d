"""What all requests share: worker threads and room, in turn by owner, and memory that goes back to the system."""
