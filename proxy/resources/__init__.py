"""What all requests share: threads, room and places, in turn by sender, and memory that goes back to the system."""
