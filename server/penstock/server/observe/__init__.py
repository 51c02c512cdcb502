"""What a front tells of its requests, and the way from there to the observer process."""
