"""Hydra group ``tide``: complete sets of options."""
