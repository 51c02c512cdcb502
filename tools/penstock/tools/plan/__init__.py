"""`penstock plan`: plans capacity by simulating candidate configurations."""
