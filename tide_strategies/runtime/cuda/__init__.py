"""Running schedules on GPUs of one host: copy engines, stream memory operations, one summing kernel."""
