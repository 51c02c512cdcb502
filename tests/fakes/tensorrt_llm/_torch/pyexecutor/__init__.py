"""The engine loop and what it is made of."""
