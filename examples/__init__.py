"""Example models and data; every file here runs as it stands on two CPU cores."""
