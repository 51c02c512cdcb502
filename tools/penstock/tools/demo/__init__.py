"""`penstock demo`: starts a separate service on the embedded executor and shows three streams."""
