"""The ``tide`` command line."""
