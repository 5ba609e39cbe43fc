"""Checks on schedules, without running them on real memory."""
