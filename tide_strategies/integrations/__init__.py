"""Doors to TIDE from training frameworks. Nothing here is imported before the framework itself is."""
