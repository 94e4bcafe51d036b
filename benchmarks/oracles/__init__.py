"""What a tree gives, frozen in a folder, so that a rework can be held to it."""
