"""Split graphs kept on disk: their key, their form as bytes, their files."""
