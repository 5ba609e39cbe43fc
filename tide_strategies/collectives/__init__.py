"""Collectives as schedules: pure data, no torch, readable by executors, verifier and simulator alike."""
