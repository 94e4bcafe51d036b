"""autosplit inside other machinery: ``torch.compile``, and models with graph breaks."""
