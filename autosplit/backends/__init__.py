"""GraphModule -> callable: eager, Inductor, CUDA graphs."""
