"""Train a language model on a file of text, over the ranks of a pipeline, by one command."""
