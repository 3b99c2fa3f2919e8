"""What our server is measured against: the same engine behind servers of other shapes."""
