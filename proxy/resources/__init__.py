"""Resources that all requests share: worker threads and places, scheduled fairly by sender, and freed memory."""
