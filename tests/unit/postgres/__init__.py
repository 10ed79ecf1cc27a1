"""What needs no server."""
