"""What a service writes down of its own work: how long steps took, and what was asked of it."""
