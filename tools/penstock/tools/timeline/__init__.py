"""`penstock timeline`: converts a flight record to a Perfetto trace and a summary."""
