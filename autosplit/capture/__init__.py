"""nn.Module -> joint forward/backward graph with roles."""
