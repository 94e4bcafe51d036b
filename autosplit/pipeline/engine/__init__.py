"""Run the actions of a step: messages between ranks, moves of activations, execution."""
