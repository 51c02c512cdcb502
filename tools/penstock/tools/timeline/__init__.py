"""`penstock timeline`: converts a flight recording to a Perfetto trace and a summary."""
