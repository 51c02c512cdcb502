"""`penstock demo`: starts a service and displays three streams, or one of three scenes."""
