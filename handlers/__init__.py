"""Example domains: plain functions, one module each. Importing them has no side effects; a configuration names them."""
