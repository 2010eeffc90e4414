"""Model families: modules without process groups."""
