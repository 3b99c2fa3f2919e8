"""Replaying traces of agent sessions against a server: what `bench/replay_agentx.py` is made of."""
