"""Parts of `bench.frontend` and `bench.stalled`: a model folder, a server process, load, clients. Loopback only."""
