"""Code for those who fork: nothing in the package imports it; TOML files name it by import path."""
