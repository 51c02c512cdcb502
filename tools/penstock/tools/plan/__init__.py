"""`penstock plan`: how many engines a load needs, found by simulating candidates."""
