"""How long the first step takes, by depth, cold and out of the cache."""
