"""`penstock plan`: capacity planning by simulation of candidate configurations."""
