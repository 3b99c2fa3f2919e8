"""One engine process per rank. It knows token ids and pages; nothing about HTTP, text or tokenizers."""
