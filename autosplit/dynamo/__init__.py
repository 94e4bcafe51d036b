"""The backend ``"autosplit"`` of ``torch.compile``, and splitting of models with graph breaks."""
