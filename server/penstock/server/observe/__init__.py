"""Records of requests and steps, and everything derived from them."""
