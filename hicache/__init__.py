"""The host prefix cache: one pool of pages for all ranks, its index, and the way between it and a device.

`keys`, `index` and `plan` are the server's, on its loop's thread; `pool` is mapped by everyone; `transfer` is the
engine's. Nothing here knows HTTP, text or scheduling, and only the CUDA transfer imports torch.
"""
