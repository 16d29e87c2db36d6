"""What things cost: hardware, operation counts, step times, capacity."""
