"""One record of a request, one of a step, and what is made of them."""
