"""Configuration files for ``accelerate launch``: complete, to copy from."""
