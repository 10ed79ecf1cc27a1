"""One engine, or one command, on real servers."""
