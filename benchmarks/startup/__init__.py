"""How long the first step takes, by depth."""
