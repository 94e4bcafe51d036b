"""What people report about pipelining and split backwards, on stock torch and with autosplit."""
