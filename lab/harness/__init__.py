"""What plays a stream of requests on real engines: child processes, a sidecar, a player."""
