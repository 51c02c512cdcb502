"""`penstock demo`: a separate service on the embedded executor, and three streams from it."""
