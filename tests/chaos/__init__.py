"""Crashes, zombies, cuts and restarts on real servers; judged by tests/support/verifier.py alone."""
