"""The one event-loop process: HTTP in, SSE out. It never imports torch; importing this package imports nothing."""
