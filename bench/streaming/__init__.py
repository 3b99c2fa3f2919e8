"""Parts of `bench.frontend`: a model folder, a server process, load, a probe, the ceiling. Loopback only."""
