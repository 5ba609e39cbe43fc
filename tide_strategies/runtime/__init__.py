"""Running schedules: arenas, executors, bootstrap and orderly teardown."""
