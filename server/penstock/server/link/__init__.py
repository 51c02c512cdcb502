"""The connection between fronts and an engine: frames and sockets."""
