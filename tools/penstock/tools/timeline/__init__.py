"""`penstock timeline`: a flight recording as a picture for Perfetto and as a summary."""
