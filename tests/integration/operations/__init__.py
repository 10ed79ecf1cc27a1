"""What an operator does: commands on real servers."""
