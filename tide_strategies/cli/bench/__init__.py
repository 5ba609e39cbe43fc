"""``tide bench``: measurements beside stock, in one run."""
