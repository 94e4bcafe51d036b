"""The tables and figures of 2BP (arXiv 2405.18047), each measured again by one command."""
