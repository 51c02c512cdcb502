"""The link between fronts and an engine: frames, sockets, and the same in memory."""
