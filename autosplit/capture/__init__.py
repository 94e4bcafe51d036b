"""Capture of an ``nn.Module`` as a joint graph, whose inputs and outputs have roles."""
