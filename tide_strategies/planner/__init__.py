"""What a plan is decided on: sizing equations, memory forecasts, simulated times, calibration. No torch."""
