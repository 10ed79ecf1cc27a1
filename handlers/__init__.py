"""Example domains: plain functions, one module each. Importing them has no effect; a config names them."""
