"""What crosses a process border: shared memory, rings, doorbells, heartbeats and messages.

Only this package maps memory that two processes see.
"""
