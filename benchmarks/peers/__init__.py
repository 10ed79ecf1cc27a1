"""Other libraries at the same work, each as an expert user would set it up: see README.md and catalogue.py."""
