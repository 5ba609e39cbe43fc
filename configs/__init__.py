"""Configuration files: Hydra groups and complete examples, one folder each."""
