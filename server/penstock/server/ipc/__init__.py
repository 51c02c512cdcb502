"""Communication between the processes of a service: frames, sockets and status boards."""
