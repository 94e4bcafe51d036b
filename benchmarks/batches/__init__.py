"""Steps over microbatches of different lengths: fixed schedules, and the order that is found."""
