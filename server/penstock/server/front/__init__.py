"""The front (front-end process), independent of its transport: live requests, their streams, and
the handling of engine events."""
