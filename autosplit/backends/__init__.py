"""GraphModule -> callable: eager, Inductor."""
