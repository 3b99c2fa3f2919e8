"""Parts of `bench.cache_serving`: requests whose reuse is told, time to first token, decodes beside copies."""
