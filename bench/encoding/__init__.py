"""What bench/encode.py measures, one file a part."""
