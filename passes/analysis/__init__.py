"""What the operators of a graph are, cost and alias, and symbolic sizes as numbers."""
