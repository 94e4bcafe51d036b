"""Private API of autograd's engine and of ``.grad``."""
