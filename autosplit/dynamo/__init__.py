"""The ``torch.compile`` backend, and models with graph breaks."""
