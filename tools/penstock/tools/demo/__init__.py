"""`penstock demo`: a service of its own on the embedded executor, and three streams from it."""
